"""How often a memory's units hold the turns that answer a question, beside BM25 over the same pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvexp.notes.rag import Rag
from kvexp.notes.units import NotesKind, Turn


@dataclass(frozen=True)
class Sought:
    """A question and the turns that answer it; `group` is the part of the benchmark that it belongs to."""

    question: str
    evidence: frozenset[str]
    group: str = ""


@dataclass(frozen=True)
class Hit:
    """What the units of one question hold: `hit` any of the evidence, `recall` how much of it.

    `words` is the length of the units in words.
    """

    group: str
    hit: bool
    recall: float
    words: int


def hits(kind: NotesKind, turns: Sequence[Turn], sought: Sequence[Sought], k: int = 10) -> list[Hit]:
    """Fill a memory and ask it the questions; those without evidence among the turns are left out."""
    notes = kind.open()
    for turn in turns:
        notes.add(turn)
    known = {turn.id for turn in turns}
    found = []
    for one in sought:
        evidence = one.evidence & known
        if evidence:
            units = notes.retrieve(one.question, k)
            held = evidence & {source for unit in units for source in unit.sources}
            words = sum(len(unit.text.split()) for unit in units)
            found.append(Hit(one.group, bool(held), len(held) / len(evidence), words))
    return found


def baseline(kind: NotesKind) -> Rag:
    """Return BM25 over the pieces that the units of `kind` stand for: its chunks, or else single turns."""
    return Rag(tokens=getattr(kind, "tokens", 1))
