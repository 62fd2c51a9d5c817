"""A plain memory: chunks of text, found by BM25."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvexp.notes.chunks import Chunks, Pausing, as_chunk
from kvexp.notes.retrieval import Index, fill
from kvexp.notes.units import Ask, Notes, NotesKind, Turn, Unit
from kvexp.notes.words import terms
from kvexp.tasks.base import at_least


@dataclass(frozen=True)
class Rag(NotesKind):
    """The knobs of the plain memory.

    `tokens`: tokens of a chunk, about, at most; a turn is never cut, so 1 is one turn a chunk.
    """

    id: ClassVar[str] = "rag"

    tokens: int = 128

    def __post_init__(self) -> None:
        at_least("notes.tokens", self.tokens, 1)

    def open(self, ask: Ask | None = None) -> Notes:
        """Return an empty memory; it has no step that needs a language model."""
        return Pausing(_Rag(self))


class _Rag:
    def __init__(self, kind: Rag) -> None:
        self._open = Chunks(kind.tokens)
        self._units: list[Unit] = []
        self._index = Index()

    def add(self, turn: Turn) -> None:
        self._keep(self._open.add(turn))

    def close(self) -> None:
        self._keep(self._open.close())

    def retrieve(self, query: str, k: int) -> list[Unit]:
        found = [number for number, _ in self._index.search(terms(query), k)]
        return [self._units[number] for number in fill(found, k, len(self._units))]

    def _keep(self, turns: list[Turn]) -> None:
        if turns:
            unit = as_chunk(turns)
            self._units.append(unit)
            self._index.add(terms(unit.text))
