"""state_change: a fact that is updated from note to note, and asked at the end.

A stress for methods that reuse notes: each note is a unit of its own and says one value of one fact, so a
value that was true once stands in the prompt beside the one that is true now, in the same words. Only the
order of the notes, or their days where the notes are shuffled, tells which is the latest. The question
repeats the note up to its value, which is one word, of one token where the tokenizer allows, so that small
models can answer too.

`stale` is the share of answers that were true before, the failure that the task is made for; facts are
grouped by how often they changed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Literal, NamedTuple

from kvexp.errors import UserError
from kvexp.notes.units import Unit, as_unit
from kvexp.prompt import encode
from kvexp.tasks.base import Task, at_least, at_most
from kvexp.tasks.labels import rows_sha256
from kvexp.tasks.noted import Frame
from kvexp.tasks.passkey_text import NAMES, WORDS
from kvexp.tasks.questions import Question, QuestionSet

INSTRUCTION = (
    "These are notes of secret words, each with the day on which it was taken. A secret word may change: only"
    " the latest one counts."
)
_FACT = "The secret word of {name} is now"


class Note(NamedTuple):
    """What a note says: the word of a name from a day on."""

    day: int
    name: str
    word: str

    @property
    def unit(self) -> Unit:
        """The note as a unit of text."""
        text = f"[day {self.day}] {_FACT.format(name=self.name)} {self.word}."
        return Unit(f"day-{self.day}", as_unit(text), (f"day-{self.day}",), f"day {self.day}")


@dataclass(frozen=True)
class StateChange(Task):
    """The generated task and its knobs.

    `n`: contexts. `names`: facts in each, one question a fact; their numbers of changes are 0, 1, ...,
    `changes`, again and again. `changes`: how often a fact changes, at most.
    `order`: "time" (notes stand in the order of their days) or "shuffled" (only the days tell it).
    """

    id: ClassVar[str] = "state_change"
    kind: ClassVar[str] = "questions"
    shared_context: ClassVar[bool] = False
    known_answers: ClassVar[bool] = True
    units: ClassVar[bool] = True

    n: int = 10
    names: int = 8
    changes: int = 3
    order: Literal["time", "shuffled"] = "time"

    def __post_init__(self) -> None:
        at_least("task.n", self.n, 1)
        at_least("task.names", self.names, 1)
        at_most("task.names", self.names, len(NAMES))
        at_least("task.changes", self.changes, 0)
        if sum(self._told) > len(WORDS):
            raise UserError(
                f"task.names={self.names} with task.changes={self.changes} needs {sum(self._told)} words, and"
                f" there are {len(WORDS)}: lower one of them"
            )

    def load(
        self,
        tokenizer: Any,
        *,
        seed: int,
        split: str = "test",
        limit: int | None = None,
        data_dir: str | None = None,
    ) -> QuestionSet:
        """Return the questions, context by context; those of one context share it."""
        self.check_asked(split, limit)
        stream = f"{self.id}/{seed}" + ("" if split == "test" else f"/{split}")
        single = [word for word in WORDS if len(encode(tokenizer, f" {word}")) == 1]
        frame = Frame(tokenizer, INSTRUCTION)
        questions: list[Question] = []
        for index in range(self.n):
            notes = self._drawn(single, random.Random(f"{stream}/{index}"))
            questions += self._questions(frame, notes, index)
        return QuestionSet(
            questions=questions[:limit],
            score=score,
            metrics=("accuracy", "stale"),
            data_sha256=rows_sha256([WORDS, NAMES]),
            stop=("\n",),
        )

    @property
    def _told(self) -> list[int]:
        """How often each fact is told: once, and once more for each change."""
        return [i % (self.changes + 1) + 1 for i in range(self.names)]

    def _drawn(self, single: Sequence[str], rng: random.Random) -> list[Note]:
        """The notes of a context as they stand; no word is in two, and those of one token come first."""
        names = rng.sample(NAMES, self.names)
        turns = [name for name, times in zip(names, self._told, strict=True) for _ in range(times)]
        others = [word for word in WORDS if word not in single]
        words = [*rng.sample(single, len(single)), *rng.sample(others, len(others))][: len(turns)]
        rng.shuffle(turns)
        days = accumulate(rng.randint(1, 9) for _ in turns)
        notes = [Note(*told) for told in zip(days, turns, words, strict=True)]
        return rng.sample(notes, len(notes)) if self.order == "shuffled" else notes

    def _questions(self, frame: Frame, notes: Sequence[Note], index: int) -> list[Question]:
        units = [note.unit for note in notes]
        found = []
        for place, name in enumerate(sorted({note.name for note in notes})):
            words = [note.word for note in sorted(notes) if note.name == name]
            changes = len(words) - 1
            found.append(
                frame.question(
                    units,
                    _FACT.format(name=name),
                    words[-1],
                    id=f"{index}-{place}",
                    sample=index * self.names + place,
                    expected=(words[-1], *words[:-1]),
                    max_new_tokens=max(len(encode(frame.tokenizer, f" {word}")) for word in words) + 2,
                    group=f"{changes} change" + ("" if changes == 1 else "s"),
                )
            )
        return found


def score(question: Question, text: str) -> dict[str, float]:
    """Return whether the answer's first word is the latest value, `accuracy`, or an earlier one, `stale`."""
    word = text.split()[0].strip(".,;:!?\"'()").casefold() if text.split() else ""
    latest, *earlier = (value.casefold() for value in question.expected)
    return {"accuracy": float(word == latest), "stale": float(word in earlier)}
