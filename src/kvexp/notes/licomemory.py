"""LiCoMemory: a graph of entities over chunks of text, with sessions above them.

LiCoMemory: Lightweight and Cognitive Agentic Memory for Efficient Long-Term Reasoning (Huang et al., 2025,
arXiv 2511.01448). There a language model turns chunks into triples and sessions into summaries; a question's
entities lead to the nearest ones of the graph, whose triples are ranked by similarity, then by

    R = (w S_session + (1 - w) S_triple) exp(-(age / typical gap)^k),

and the chunks of the best triples make the context, in order.

Offline, a triple is a subject, a verb and a phrase, an entity the stems of a phrase or name, so that two
names of the same stems are merged, and a session is known by all of its words. Departures: similarities are
BM25, divided by the best; a chunk sums its three best triples with weights 1, 1/2, 1/3, and lends a share of
that to the chunks beside it, since the words of an answer often stand next to those of its question; chunks
are short (the repository: 1200 tokens), since ten of them are a prompt; they are the units, in the order of
their scores, without the triples; 100 triples are ranked (the repository: 20), since a phrase says less than
what a language model writes, and ten chunks of three triples are 30 already. The number of entities and the
weight of the session are the repository's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import median
from typing import ClassVar

from kvexp.errors import UserError
from kvexp.notes.chunks import Chunks, Pausing, as_chunk
from kvexp.notes.llm import named
from kvexp.notes.retrieval import Index, best, fill
from kvexp.notes.summary import summarised
from kvexp.notes.triples import Triple, asked, entity, made
from kvexp.notes.units import Ask, Notes, NotesKind, Turn, Unit
from kvexp.notes.words import phrases, terms
from kvexp.tasks.base import at_least

_BEST = 3  # triples that a chunk sums
_SHORT = 0.3  # b of BM25 over triples: their lengths hardly differ


@dataclass(frozen=True)
class LiCoMemory(NotesKind):
    """The knobs of LiCoMemory.

    `tokens`: tokens of a chunk, about, at most. `entities`: entities of the graph that each one of the
    question leads to. `triples`: triples that are ranked. `session_weight`: w above.
    `beside`: the share of its triples' score that a chunk lends to the one before it and the one after it in
    its session.
    `decay`: k above, over the days since a chunk (0: age does not matter; the repository's option: 0.1).
    `summaries`: units beside the k best: so many sessions, in three of their sentences each.
    `llm`: the model that finds triples and writes summaries: its name at the endpoint, or "self" for the
    model under test (null: offline).
    """

    id: ClassVar[str] = "licomemory"

    tokens: int = 128
    entities: int = 5
    triples: int = 100
    session_weight: float = 0.2
    beside: float = 0.5
    decay: float = 0.0
    summaries: int = 0
    llm: str | None = None

    def __post_init__(self) -> None:
        for knob in ("tokens", "entities", "triples"):
            at_least(f"notes.{knob}", getattr(self, knob), 1)
        at_least("notes.summaries", self.summaries, 0)
        for knob in ("session_weight", "beside", "decay"):
            if not 0 <= getattr(self, knob) <= 1:
                raise UserError(f"notes.{knob}={getattr(self, knob)} is no share: use a number from 0 to 1")

    def open(self, ask: Ask | None = None) -> Notes:
        """Return an empty memory; see `NotesKind.open`."""
        ask = ask or named(self.llm, "notes.llm")
        return Pausing(_LiCo(self, ask), ask)


class _LiCo:
    def __init__(self, kind: LiCoMemory, ask: Ask | None) -> None:
        self.kind, self.ask = kind, ask
        self._open = Chunks(kind.tokens)
        self._units: list[Unit] = []
        self._days: list[float | None] = []
        self._session_of: list[int] = []  # of each chunk
        self._talk: list[Turn] = []  # of the open session
        self._summaries: list[Unit] = []
        self._sessions = Index()
        self._entities, self._triples = Index(dimensions=0), Index(b=_SHORT, dimensions=0)
        self._known: dict[tuple[str, ...], int] = {}
        self._at: defaultdict[int, set[int]] = defaultdict(set)  # triples at an entity
        self._owner: list[int] = []  # the chunk of each triple

    def add(self, turn: Turn) -> None:
        self._keep(self._open.add(turn))
        if self._talk and self._talk[-1].session != turn.session:
            self._end_session()
        self._talk.append(turn)

    def close(self) -> None:
        self._keep(self._open.close())
        self._end_session()

    def retrieve(self, query: str, k: int) -> list[Unit]:
        sessions = _shares(dict(self._sessions.search(terms(query), len(self._sessions))))
        w = self.kind.session_weight
        shares = _shares(self._lent(self._by_triples(query)))
        scores = {
            chunk: (w * sessions.get(self._session_of[chunk], 0.0) + (1 - w) * share) * self._recency(chunk)
            for chunk, share in shares.items()
        }
        chosen = fill(best(scores, k), k, len(self._units))
        first = best(sessions, self.kind.summaries)
        return [*(self._summaries[number] for number in first), *(self._units[number] for number in chosen)]

    def _keep(self, turns: list[Turn]) -> None:
        """Take a whole chunk into the graph."""
        if not turns:
            return
        number = len(self._units)
        unit = as_chunk(turns)
        self._units.append(unit)
        self._days.append(turns[0].day)
        self._session_of.append(len(self._summaries))
        for triple in asked(self.ask, unit.text, unit.time) if self.ask else made(turns):
            self._link(triple, number)

    def _link(self, triple: Triple, chunk: int) -> None:
        number = self._triples.add(triple.terms)
        self._owner.append(chunk)
        for name in filter(None, triple.ends):
            if name not in self._known:
                self._known[name] = self._entities.add(name)
            self._at[self._known[name]].add(number)

    def _end_session(self) -> None:
        """Take in the open session."""
        if self._talk:
            self._sessions.add(term for turn in self._talk for term in terms(turn.said))
            self._summaries.append(summarised(self._talk, self._sessions.idf, self.ask))
            self._talk = []

    def _by_triples(self, query: str) -> dict[int, float]:
        """The scores of the chunks whose triples are incident to the question's entities."""
        meant = [
            self._entities.search(entity(" ".join(words)), self.kind.entities) for words in phrases(query)
        ]
        incident = {triple for found in meant for number, _ in found for triple in self._at[number]}
        ranked = self._triples.search(terms(query), len(self._owner))
        of_chunk: defaultdict[int, list[float]] = defaultdict(list)
        for number, score in islice((item for item in ranked if item[0] in incident), self.kind.triples):
            of_chunk[self._owner[number]].append(score)
        return {
            chunk: math.fsum(score / (1 + place) for place, score in enumerate(scores[:_BEST]))
            for chunk, scores in of_chunk.items()
        }

    def _lent(self, scores: dict[int, float]) -> dict[int, float]:
        """Scores after each chunk has lent a share of its own to those beside it in its session."""
        lent = defaultdict(float, scores)
        for chunk, score in scores.items() if self.kind.beside else ():
            for other in (chunk - 1, chunk + 1):
                there = 0 <= other < len(self._units)
                if there and self._session_of[other] == self._session_of[chunk]:
                    lent[other] += self.kind.beside * score
        return lent

    def _recency(self, chunk: int) -> float:
        """The last factor of R; 1 where age does not matter or is not known."""
        own = self._days[chunk]
        if not self.kind.decay or own is None:
            return 1.0
        days = sorted({day for day in self._days if day is not None})
        gap = max(1.0, median([b - a for a, b in pairwise(days)] or [1.0]))
        return math.exp(-(((days[-1] - own) / gap) ** self.kind.decay))


def _shares(scores: dict[int, float]) -> dict[int, float]:
    most = max(scores.values(), default=1.0)
    return {number: score / most for number, score in scores.items()}
