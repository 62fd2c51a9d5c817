"""Many demonstrations of questions and written-out answers as context, then one question, answered freely.

What dialogre, math_counting and gpqa_cot have in common, in the format of ManyICLBench (Zou et al., 2024):
two words before question and answer, demonstrations one after the other, greedy decoding up to the next
question. As in the label tasks, training rows that repeat another one or a test row are left out,
calibration and validation rows are held out in an order that no seed changes, and a seed shuffles the rest:
the context takes the first of it, traces come from what is left.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from kvexp.errors import UserError
from kvexp.tasks.base import Task, Trace, at_least, at_most
from kvexp.tasks.labels import Prompt, Row, normalise, rows_sha256
from kvexp.tasks.questions import Overall, Question, QuestionSet


class Shot(NamedTuple):
    """A question, its answer as a demonstration shows it, and what a metric wants of an answer."""

    id: str
    text: str
    shown: str
    expected: tuple[str, ...]
    group: str = ""

    @property
    def row(self) -> Row:
        """The shot as a row of a prompt."""
        return Row(self.id, self.text, self.shown)


@dataclass(frozen=True)
class ShotsTask(Task):
    """A task of demonstrations with free answers. The fields here are knobs of each of them.

    `context_tokens`: length of the context in tokens, BOS and header included; whole demonstrations only.
    `description`: start the prompt with one line that describes the task.
    `n_test`: test questions, in an order that no seed changes (null: all).
    `n_validation`: training rows held out for `split=validation`.
    `max_new_tokens`: length of an answer.
    """

    kind: ClassVar[str] = "questions"
    shared_context: ClassVar[bool] = True
    known_answers: ClassVar[bool] = True
    units: ClassVar[bool] = True
    header: ClassVar[str]
    query_word: ClassVar[str]
    answer_word: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    several_lines: ClassVar[bool] = True
    """Whether an answer may have several lines; otherwise its first line counts."""
    keeps_queries: ClassVar[bool] = True
    """Whether the text of a question may stand in the samples of a run."""

    context_tokens: int = 4096
    description: bool = True
    n_test: int | None = None
    n_validation: int = 50
    max_new_tokens: int = 512

    def __post_init__(self) -> None:
        for knob in ("context_tokens", "n_test", "n_validation", "max_new_tokens"):
            at_least(f"task.{knob}", getattr(self, knob), 1)

    @abstractmethod
    def shots(self, data_dir: str | None) -> tuple[list[Shot], list[Shot]]:
        """Return the rows for demonstrations and the test rows, in published order."""

    @abstractmethod
    def score(self, question: Question, text: str) -> dict[str, float]:
        """See `QuestionSet.score`."""

    def overall(self) -> Overall | None:
        """See `QuestionSet.overall`."""
        return None

    def load(
        self,
        tokenizer: Any,
        *,
        seed: int,
        split: str = "test",
        limit: int | None = None,
        data_dir: str | None = None,
    ) -> QuestionSet:
        """See `Task.load`. Raises UserError for a tokenizer that cannot serve a shared context."""
        self.check_asked(split, limit)
        train, test = self.shots(data_dir)
        pool = _distinct(train, without=test)
        random.Random(f"{self.id}/held-out").shuffle(pool)
        if len(pool) <= self.n_validation:
            raise UserError(
                f"task={self.id} has {len(pool)} rows for demonstrations, too few to hold out"
                f" {self.n_validation}: lower task.n_validation"
            )
        rest = pool[self.n_validation :]
        random.Random(f"{self.id}/{seed}/demonstrations").shuffle(rest)
        header = self.header if self.description else ""
        prompt = Prompt(tokenizer, header, self.query_word, self.answer_word, lines=True)
        context, used = prompt.context((one.row for one in rest), self.context_tokens)
        asked = list(test)
        at_most("task.n_test", self.n_test, len(asked))
        random.Random(f"{self.id}/test").shuffle(asked)
        asked = asked[: self.n_test] if split == "test" else pool[: self.n_validation]
        return QuestionSet(
            questions=[
                Question(
                    id=one.id,
                    sample=sample,
                    context=context,
                    query=prompt.query(one.row) if self.keeps_queries else "(not kept)",
                    query_ids=prompt.query_ids(one.row),
                    expected=one.expected,
                    max_new_tokens=self.max_new_tokens,
                    group=one.group,
                    answer_ids=prompt.answer_ids(f" {one.shown}"),
                )
                for sample, one in enumerate(asked[:limit])
            ],
            score=self.score,
            metrics=self.metrics,
            data_sha256=_sha256(train, test),
            stop=(f"\n{self.query_word}:",) if self.several_lines else ("\n",),
            notes={"demonstrations": len(used), "source": data_dir or getattr(self, "source", "")},
            overall=self.overall(),
            context=context,
            trace_source=ShotTraces(self.id, prompt, tuple(rest[len(used) :])),
        )

    def data_sha256(self, data_dir: str | None) -> str | None:
        """See `Task.data_sha256`; the hub is not asked."""
        try:
            return data_dir and _sha256(*self.shots(data_dir))
        except UserError:  # the files are gone: nothing to compare with
            return None


@dataclass(frozen=True)
class ShotTraces:
    """Draws rows that are neither asked nor held out nor in the context."""

    task: str
    prompt: Prompt
    rest: tuple[Shot, ...]

    def traces(self, n: int, labels: str, seed: int) -> list[Trace]:
        """See `QuestionSet.traces`."""
        if n > len(self.rest):
            raise UserError(
                f"calibration.n={n} is more than the {len(self.rest)} traces of task={self.task}: set"
                f" calibration.n={len(self.rest)} or less"
            )
        drawn = list(self.rest)
        random.Random(f"{self.task}/{seed}/traces").shuffle(drawn)
        return [
            Trace(
                one.id,
                self.prompt.query_ids(one.row),
                self.prompt.answer_ids(f" {one.shown}\n") if labels == "gold" else (),
            )
            for one in drawn[:n]
        ]


def _distinct(rows: Sequence[Shot], without: Sequence[Shot]) -> list[Shot]:
    seen = {normalise(row.text) for row in without}
    kept = []
    for row in rows:
        if (key := normalise(row.text)) not in seen:
            seen.add(key)
            kept.append(row)
    return kept


def _sha256(*groups: Sequence[Shot]) -> str:
    return rows_sha256(*([(one.text, one.shown, *one.expected) for one in group] for group in groups))
