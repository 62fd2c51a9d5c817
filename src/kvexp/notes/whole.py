"""No memory: all turns, in the order in which they came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvexp.notes.units import Ask, Notes, NotesKind, Turn, Unit, as_unit


@dataclass(frozen=True)
class Whole(NotesKind):
    """Everything that was said is in every prompt, a unit for each turn; `k` of `retrieve` is ignored."""

    id: ClassVar[str] = "none"

    def open(self, ask: Ask | None = None) -> Notes:
        """Return an empty memory."""
        return _Whole()


class _Whole:
    def __init__(self) -> None:
        self._units: list[Unit] = []

    def add(self, turn: Turn) -> None:
        self._units.append(Unit(turn.id, as_unit(turn.line), (turn.id,), turn.time))

    def retrieve(self, query: str, k: int) -> list[Unit]:
        return list(self._units)
