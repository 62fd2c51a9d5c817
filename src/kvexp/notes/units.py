"""Turns go in, units of text come out: what every agent memory takes and gives.

A unit's text never changes once it has been returned, starts with a character that is no space and ends with
its only closing line break. A tokenizer therefore makes the same tokens of it wherever it stands, and its
keys and values, computed once, serve every prompt that holds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

Ask = Callable[[str], str]
"""A language model: a prompt in, its answer out."""


@dataclass(frozen=True)
class Turn:
    """One thing that was said or done.

    `time` is when, as text that is shown ("4:04 pm on 20 January, 2023", "step 7"), `day` the same as a
    number of days where it is known. Turns of one `session` belong together.
    """

    id: str
    speaker: str
    text: str
    time: str = ""
    session: str = ""
    day: float | None = None

    @property
    def said(self) -> str:
        """Speaker and text in one paragraph."""
        text = tidy(self.text)
        return f"{self.speaker}: {text}" if self.speaker else text

    @property
    def line(self) -> str:
        """Time, speaker and text."""
        return f"[{self.time}] {self.said}" if self.time else self.said


@dataclass(frozen=True)
class Unit:
    """A piece of memory: its text for a prompt, and the turns that it stems from."""

    id: str
    text: str
    sources: tuple[str, ...]
    time: str = ""


class Notes(Protocol):
    """A memory that grows by one turn at a time."""

    def add(self, turn: Turn) -> None:
        """Take in the next turn."""

    def retrieve(self, query: str, k: int) -> list[Unit]:
        """Return the `k` units (or all, where there are fewer) that suit the query, the best first."""


@dataclass(frozen=True)
class NotesKind(ABC):
    """A kind of memory; the fields of a subclass are its knobs, `id` the name of its YAML file."""

    conf_group: ClassVar[str] = "notes"  # the folder of its YAML file
    id: ClassVar[str]

    @abstractmethod
    def open(self, ask: Ask | None = None) -> Notes:
        """Return an empty memory.

        `ask` answers the steps that need a language model; None: the endpoint that the knobs name, or no
        model where they name none. Raises UserError for an endpoint that is not configured, and `add` and
        `retrieve` of the memory do so for an answer that cannot be used.
        """


def tidy(text: str) -> str:
    """Return `text` without space at the ends of its lines, blank lines, and space around the whole."""
    lines = (line.rstrip() for line in text.replace("\r", "\n").split("\n"))
    return "\n".join(line for line in lines if line).strip()


def as_unit(text: str) -> str:
    """Return `text` as the text of a unit: tidy, with one line break at its end."""
    return tidy(text) + "\n"
