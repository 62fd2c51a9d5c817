"""A-MEM: one note for each turn, with keywords, context and tags of its own, linked to notes like it.

A-MEM: Agentic Memory for LLM Agents (Xu et al., 2025, arXiv 2502.12110). There a language model writes the
keywords, the context (a sentence) and the tags of a note when it comes, looks at the five nearest notes,
links some of them and may rewrite theirs; a question is turned into keywords and answered from the ten
nearest notes and those linked to them.

Offline, keywords are the words with the highest idf, tags the keywords that the nearest notes have most, the
context is a phrase made of keywords, and links are the nearest notes above a cosine of TF-IDF. Departures:
nothing is ever rewritten, so that the text of a note stays what it was; the question is asked as it stands;
notes are found by BM25 over time, content and keywords instead of an embedding. A note lends a share of its
score to the one before it and the one after it in its session, since a reply seldom repeats the words of what
it answers. Links add no units unless asked to, so that k units are k.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from kvexp.errors import UserError
from kvexp.notes.answers import texts, unreadable, values
from kvexp.notes.llm import named
from kvexp.notes.retrieval import Index, best, fill
from kvexp.notes.units import Ask, Notes, NotesKind, Turn, Unit, as_unit
from kvexp.notes.words import FILLERS, stem, terms, words
from kvexp.tasks.base import at_least

_PROMPT = """\
Below is something that was said or done. Describe it for a memory that is searched later. Answer with one \
JSON object: "keywords" (a list of at most {keywords} words or names in it, the most telling first), \
"context" (one sentence on what it is about), "tags" (a list of at most {tags} broader topics).

{line}"""
_LONGEST = 20  # letters of a keyword: longer ones are codes and numbers


class _Described(NamedTuple):
    keywords: list[str]
    context: str
    tags: list[str]


@dataclass(frozen=True)
class AMem(NotesKind):
    """The knobs of A-MEM.

    `keywords`, `tags`: how many words of each a note gets.
    `neighbours`: nearest notes that a new one is compared with; those with a cosine above `similar` are
    linked, `links` of them at most. At 0.3 a third of LoCoMo's notes have a link; at 0.6, a usual value for
    embeddings, hardly any has.
    `beside`: the share of its score that a note lends to the one before it and the one after it.
    `linked`: units beside the k best, at most: notes linked to them (the paper: about k).
    `llm`: the model that writes keywords, context and tags: its name at the endpoint, or "self" for the model
    under test (null: offline).
    """

    id: ClassVar[str] = "amem"

    keywords: int = 5
    tags: int = 3
    neighbours: int = 5
    similar: float = 0.3
    links: int = 3
    beside: float = 0.5
    linked: int = 0
    llm: str | None = None

    def __post_init__(self) -> None:
        for knob in ("keywords", "tags", "neighbours", "links", "linked"):
            at_least(f"notes.{knob}", getattr(self, knob), 0)
        for knob in ("similar", "beside"):
            if not 0 <= getattr(self, knob) <= 1:
                raise UserError(f"notes.{knob}={getattr(self, knob)} is no share: use a number from 0 to 1")

    def open(self, ask: Ask | None = None) -> Notes:
        """Return an empty memory; see `NotesKind.open`."""
        return _AMem(self, ask or named(self.llm, "notes.llm"))


class _AMem:
    def __init__(self, kind: AMem, ask: Ask | None) -> None:
        self.kind, self.ask = kind, ask
        self._units: list[Unit] = []
        self._keywords: list[list[str]] = []
        self._links: list[list[int]] = []
        self._sessions: list[str] = []
        self._index = Index()

    def add(self, turn: Turn) -> None:
        own = terms(turn.said)
        near = [number for number, _ in self._index.search(own, self.kind.neighbours)]
        described = self._asked(turn, self.ask) if self.ask else self._made(turn, near)
        alike = [number for number in near if self._index.cosine(own, number) > self.kind.similar]
        self._links.append(alike[: self.kind.links])
        self._keywords.append(described.keywords)
        self._sessions.append(turn.session)
        self._units.append(_unit(turn, described))
        self._index.add([*own, *terms(turn.time), *terms(" ".join(described.keywords))])

    def retrieve(self, query: str, k: int) -> list[Unit]:
        own = dict(self._index.search(terms(query), len(self._units)))
        scores: defaultdict[int, float] = defaultdict(float, own)
        for number, score in own.items():
            for other in self._beside(number):
                scores[other] += self.kind.beside * score
        found = [number for number in best(scores, k) if scores[number] > 0]
        chosen = fill(found, k, len(self._units))
        more = dict.fromkeys(other for number in chosen for other in self._links[number])
        extra = [number for number in more if number not in chosen][: self.kind.linked]
        return [self._units[number] for number in [*chosen, *extra]]

    def _beside(self, number: int) -> list[int]:
        """The notes right before and after one, of the same session."""
        last = len(self._units) - 1
        near = (other for other in (number - 1, number + 1) if 0 <= other <= last)
        return [other for other in near if self._sessions[other] == self._sessions[number]]

    def _made(self, turn: Turn, near: Sequence[int]) -> _Described:
        """Describe a turn from its words and the notes near it."""
        found = dict[str, str]()
        for word in words(turn.text):
            if word not in FILLERS and len(word) <= _LONGEST:
                found.setdefault(stem(word), word)
        # The sort is stable: of equal words the first in the text is first.
        ranked = sorted(found, key=lambda term: -self._index.idf(term))
        keywords = [found[term] for term in ranked[: self.kind.keywords]]
        shared = Counter(word for number in near for word in self._keywords[number])
        tags = [word for word, _ in shared.most_common() if word not in keywords][: self.kind.tags]
        about = " and ".join(keywords[:2]) or "nothing in particular"
        return _Described(keywords, f"{turn.speaker or 'something'} about {about}", tags)

    def _asked(self, turn: Turn, ask: Ask) -> _Described:
        """Describe a turn as the language model does."""
        answer = ask(_PROMPT.format(keywords=self.kind.keywords, tags=self.kind.tags, line=turn.line))
        given = next((value for value in values(answer) if isinstance(value, dict)), {})
        if not isinstance(given.get("keywords"), list):
            raise unreadable('a JSON object with "keywords", "context" and "tags"', answer)
        keywords, tags = texts(given["keywords"]), texts(given.get("tags"))
        context = " ".join(str(given.get("context") or "").split())
        return _Described(keywords[: self.kind.keywords], context, tags[: self.kind.tags])


def _unit(turn: Turn, described: _Described) -> Unit:
    """Return a note as a unit: what was said and when, then what the memory knows of it."""
    parts = [turn.line]
    for name, text in (
        ("context", described.context),
        ("keywords", ", ".join(described.keywords)),
        ("tags", ", ".join(described.tags)),
    ):
        if text:
            parts.append(f"{name}: {text}")
    return Unit(turn.id, as_unit(" | ".join(parts)), (turn.id,), turn.time)
