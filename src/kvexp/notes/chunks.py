"""Turns packed into chunks of text of about equal length."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvexp.notes.units import Ask, Notes, Turn, Unit, as_unit

_TOKEN = re.compile(r"[^\W\d_]{1,8}|\d{1,3}|_|[^\w\s]")


def length(text: str) -> int:
    """Return about how many tokens a text has, the same for every tokenizer.

    Counted are marks, up to eight letters of a word and up to three digits of a number at a time.
    """
    return len(_TOKEN.findall(text))


@dataclass
class Chunks:
    """Takes turns and parts with whole chunks: turns of one session, of at most `tokens` tokens by `length`.

    A turn is never cut; one that is longer than a chunk is a chunk of its own.
    """

    tokens: int
    _turns: list[Turn] = field(default_factory=list)
    _length: int = 0

    def add(self, turn: Turn) -> list[Turn]:
        """Take a turn; return the turns of the chunk that it closes, if it closes one."""
        more = length(turn.said)
        same = bool(self._turns) and self._turns[-1].session == turn.session
        closed = [] if same and self._length + more <= self.tokens else self.close()
        self._turns.append(turn)
        self._length += more
        return closed

    def close(self) -> list[Turn]:
        """Return the turns of the open chunk, and open an empty one."""
        closed, self._turns, self._length = self._turns, [], 0
        return closed


def span(turns: Sequence[Turn]) -> str:
    """Return the name of turns that follow one another: the first and the last, or the only one."""
    return turns[0].id if len(turns) == 1 else f"{turns[0].id}..{turns[-1].id}"


def as_chunk(turns: Sequence[Turn]) -> Unit:
    """Return turns as a unit: a line of the time wherever it changes, and a line for each turn."""
    lines, time = [], ""
    for turn in turns:
        if turn.time and turn.time != time:
            lines.append(f"[{turn.time}]")
            time = turn.time
        lines.append(turn.said)
    return Unit(span(turns), as_unit("\n".join(lines)), tuple(turn.id for turn in turns), turns[0].time)


class Growing(Notes, Protocol):
    """A memory of chunks, which answers from whole ones alone."""

    def close(self) -> None:
        """Take in the open chunk as it is."""


@dataclass
class Pausing:
    """A memory of chunks that is asked as if it ended there, and then goes on as if it had not been asked.

    A question is answered by a copy whose open chunk is closed; it serves until the next turn. `ask` is what
    the memory asks, which is not copied. A unit that ends at the open chunk's present end has a name of its
    own, so that a name never stands for two texts.
    """

    growing: Growing
    ask: Ask | None = None
    _ended: Growing | None = None

    def add(self, turn: Turn) -> None:
        """See `Notes.add`."""
        self._ended = None
        self.growing.add(turn)

    def retrieve(self, query: str, k: int) -> list[Unit]:
        """See `Notes.retrieve`."""
        if self._ended is None:
            self._ended = copy.deepcopy(self.growing, {id(self.ask): self.ask})
            self._ended.close()
        return self._ended.retrieve(query, k)
