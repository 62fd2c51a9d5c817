"""Label tasks: many demonstrations of query and label as context, then one query whose label is asked.

The format is `Query: text` and `Intent: label` on two lines (the two words differ between tasks), after an
optional line of description. Every purpose draws from a random stream of its own, so that more traces or a
smaller limit never change what another purpose draws.
"""

from __future__ import annotations

import hashlib
import json
import random
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from kvexp.errors import UserError
from kvexp.prompt import Context, bos_ids, continuation, encode
from kvexp.tasks.base import Document, Task, TaskSet, Trace, at_least


class Row(NamedTuple):
    """A text and its label as it stands in a prompt; `id` says where the text comes from."""

    id: str
    text: str
    label: str


class Draw(Protocol):
    """What a seed and a split draw from the data of a task."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels in sorted order."""

    @property
    def queries(self) -> Sequence[Row]:
        """Rows of the split."""

    @property
    def calibration(self) -> Sequence[Row]:
        """Rows whose labels are not used, beside those of the split."""

    @property
    def sha256(self) -> str:
        """The sha256 of the data."""

    def demonstrations(self) -> Iterable[Row]:
        """Rows for the context, in order; may be endless."""

    def traces(self, context: Sequence[Row], n: int, seed: int) -> list[Row]:
        """Rows for `n` traces beside the rows of the context, or as many as there are."""


@dataclass(frozen=True)
class Prompt:
    """The prompt format of a task for one tokenizer. `header` is the text before the first demonstration.

    `lines`: whether a text keeps its line breaks.
    """

    tokenizer: Any
    header: str
    query_word: str
    answer_word: str
    lines: bool = False

    def query(self, row: Row) -> str:
        """The text that asks for the label of `row`."""
        text = row.text.strip() if self.lines else " ".join(row.text.split())
        return f"{self.query_word}: {text}\n{self.answer_word}:"

    def query_ids(self, row: Row) -> tuple[int, ...]:
        """Token ids of the query, as they stand after a line of the context."""
        return tuple(continuation(self.tokenizer, "\n", self.query(row)))

    def answer_ids(self, text: str) -> tuple[int, ...]:
        """Token ids of ` label` (or ` label\\n`), as they stand after a query."""
        return tuple(continuation(self.tokenizer, f"{self.answer_word}:", text))

    def context(self, rows: Iterable[Row], tokens: int) -> tuple[Context, list[Row]]:
        """Cut `rows` to the whole demonstrations that fit in `tokens`, BOS and header included.

        Stops at the first that does not fit, so that the choice does not favour short texts. Raises UserError
        when not one fits, or when the context is no exact token prefix of the text that follows it.
        """
        header = bos_ids(self.tokenizer) + tuple(encode(self.tokenizer, self.header))
        used: list[Row] = []
        chunks: list[tuple[int, ...]] = []
        text, length = self.header, len(header)
        for row in rows:
            demonstration = f"{self.query(row)} {row.label}\n"
            chunk = tuple(continuation(self.tokenizer, "\n" if text else "", demonstration))
            if length + len(chunk) > tokens:
                break
            used.append(row)
            chunks.append(chunk)
            text, length = text + demonstration, length + len(chunk)
        if not used:
            raise UserError(
                f"task.context_tokens={tokens} holds no whole demonstration: set task.context_tokens=1024"
            )
        context = Context(header, tuple(chunks))
        self._check_prefix(context, text, used[0])
        return context, used

    def _check_prefix(self, context: Context, text: str, row: Row) -> None:
        parts = context.ids[len(bos_ids(self.tokenizer)) :] + self.query_ids(row)
        if tuple(encode(self.tokenizer, text + self.query(row))) != parts:
            raise UserError(
                "the tokenizer of this model merges across the ends of demonstrations, "
                "so one encoded context cannot serve its queries: use another model"
            )


@dataclass(frozen=True)
class LabelTask(Task):
    """A task that asks for one label of a fixed set. The fields here are knobs of every label task.

    `context_tokens`: length of the context in tokens, BOS and header included; whole demonstrations only.
    `n_calibration`: queries without a label that measure the bias of the labels for calibrated accuracy.
    `description`: start the prompt with one line that describes the task.
    `permute_labels`: a control; the demonstrations show every label as another one, while traces and expected
    answers keep the true ones.
    """

    kind: ClassVar[str] = "labels"
    shared_context: ClassVar[bool] = True
    units: ClassVar[bool] = True
    query_word: ClassVar[str] = "Query"
    answer_word: ClassVar[str] = "Intent"
    lines: ClassVar[bool] = False
    """Whether texts keep their line breaks."""
    header: ClassVar[str]

    context_tokens: int = 4096
    n_calibration: int = 50
    description: bool = True
    permute_labels: bool = False

    def __post_init__(self) -> None:
        at_least("task.context_tokens", self.context_tokens, 1)
        at_least("task.n_calibration", self.n_calibration, 1)

    @abstractmethod
    def draw(self, tokenizer: Any, seed: int, split: str, data_dir: str | None) -> Draw:
        """Draw the rows of a seed and a split."""

    def load(
        self,
        tokenizer: Any,
        *,
        seed: int,
        split: str = "test",
        limit: int | None = None,
        data_dir: str | None = None,
    ) -> TaskSet:
        """See `Task.load`. Raises UserError for a tokenizer that cannot serve a shared context."""
        self.check_asked(split, limit)
        drawn = self.draw(tokenizer, seed, split, data_dir)
        rows, permutation = drawn.demonstrations(), None
        if self.permute_labels:
            permutation = shown = derangement(drawn.labels, f"{self.id}/{seed}/permutation")
            rows = (row._replace(label=shown[row.label]) for row in rows)
        header = self.header if self.description else ""
        prompt = Prompt(tokenizer, header, self.query_word, self.answer_word, self.lines)
        context, used = prompt.context(rows, self.context_tokens)
        ids = {label: prompt.answer_ids(f" {label}") for label in drawn.labels}
        if len(set(ids.values())) < len(ids):
            raise UserError("the tokenizer of this model gives two labels the same tokens: use another model")
        return TaskSet(
            context=context,
            documents=[
                Document(row.id, sample, prompt.query(row), prompt.query_ids(row), row.label, ids[row.label])
                for sample, row in enumerate(drawn.queries[:limit])
            ],
            labels=drawn.labels,
            label_ids=tuple(ids.values()),
            answer_ids=tuple(prompt.answer_ids(f" {label}\n") for label in drawn.labels),
            end_id=encode(tokenizer, "\n")[-1],
            calibration_queries=[list(prompt.query_ids(row)) for row in drawn.calibration],
            data_sha256=drawn.sha256,
            stop=("\n",),
            max_new_tokens=max(map(len, ids.values())) + 1,
            permutation=permutation,
            trace_source=LabelTraces(self.id, prompt, drawn, tuple(used)),
        )


@dataclass(frozen=True)
class LabelTraces:
    """Draws the traces of a label task: rows that are neither documents nor calibration queries."""

    task: str
    prompt: Prompt
    drawn: Draw
    context: tuple[Row, ...]

    def traces(self, n: int, labels: str, seed: int) -> list[Trace]:
        """See `TaskSet.traces`."""
        rows = self.drawn.traces(self.context, n, seed)
        if len(rows) < n:
            raise UserError(
                f"calibration.n={n} is more than the {len(rows)} traces of task={self.task}: "
                f"set calibration.n={len(rows)} or less"
            )
        wrong = random.Random(f"{self.task}/{seed}/wrong")
        traces = []
        for row in rows:
            other = wrong.choice([label for label in self.drawn.labels if label != row.label])
            answer = {"gold": f" {row.label}\n", "wrong": f" {other}\n", "none": ""}[labels]
            ids = self.prompt.answer_ids(answer) if answer else ()
            traces.append(Trace(row.id, self.prompt.query_ids(row), ids))
        return traces


def normalise(text: str) -> str:
    """Return `text` without case and with single spaces: two texts that agree in it count as the same."""
    return " ".join(text.casefold().split())


def rows_sha256(*groups: Iterable[Iterable[str]]) -> str:
    """Return the sha256 of groups of rows, order and group borders included."""
    digest = hashlib.sha256()
    for group in groups:
        for row in group:
            digest.update(json.dumps(list(row), ensure_ascii=False).encode() + b"\n")
        digest.update(b"\n")
    return digest.hexdigest()


def derangement(labels: tuple[str, ...], stream: str) -> dict[str, str]:
    """Return a permutation of the labels, drawn uniformly from those that leave no label in place."""
    rng, shuffled = random.Random(stream), list(labels)
    while any(a == b for a, b in zip(labels, shuffled, strict=True)):
        rng.shuffle(shuffled)
    return dict(zip(labels, shuffled, strict=True))
