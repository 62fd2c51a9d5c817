"""What a task is and what it hands out: one context, the documents asked about it, traces for calibration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from kvexp.errors import UserError, suggest
from kvexp.prompt import Context

SPLITS = ("test", "validation")
TRACE_LABELS = ("gold", "none", "wrong")


@dataclass(frozen=True)
class Document:
    """One query of a split and its expected answer.

    `query` is the text of the prompt after the context, `query_ids` its tokens, `expected` the label as it
    stands in a prompt and `expected_ids` the tokens of a space and that label. `sample` counts the documents.
    """

    id: str
    sample: int
    query: str
    query_ids: tuple[int, ...]
    expected: str
    expected_ids: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """A query for calibration; `answer_ids` are the tokens of " label\\n", or () where the query ends it."""

    id: str
    query_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


class TraceSource(Protocol):
    """Draws the traces of a task set."""

    def traces(self, n: int, labels: str, seed: int) -> list[Trace]:
        """See `TaskSet.traces`."""


@dataclass(frozen=True)
class TaskSet:
    """A task loaded for one tokenizer, seed and split.

    `labels` are sorted and have no leading space; `label_ids[i]` are the tokens of " " + `labels[i]` and
    `answer_ids[i]` those of " label\\n". `end_id` is the token of the line break that ends a label.
    `calibration_queries` are queries without a label, disjoint from the documents. `data_sha256` names the
    data, `stop` and `max_new_tokens` (longest label and its line break) bound free generation.
    `permutation` maps a true label to the one that the context shows for it (None: the context is true);
    documents always expect the true label.
    """

    context: Context
    documents: list[Document]
    labels: tuple[str, ...]
    label_ids: tuple[tuple[int, ...], ...]
    answer_ids: tuple[tuple[int, ...], ...]
    end_id: int
    calibration_queries: list[list[int]]
    data_sha256: str
    stop: tuple[str, ...]
    max_new_tokens: int
    permutation: dict[str, str] | None = None
    trace_source: TraceSource | None = field(default=None, repr=False, compare=False)

    def traces(self, n: int, labels: str, seed: int) -> list[Trace]:
        """Return `n` traces with distinct queries that are neither documents nor calibration queries.

        `labels` is "gold" (query and its label), "wrong" (query and another label) or "none" (query alone).
        The first `n` of a larger request with the same seed are the same traces. Raises UserError when fewer
        exist.
        """
        one_of("calibration.labels", labels, TRACE_LABELS)
        at_least("calibration.n", n, 1)
        if self.trace_source is None:
            raise UserError("this task has no traces: set calibration.task to the name of a label task")
        return self.trace_source.traces(n, labels, seed)


@dataclass(frozen=True)
class Task(ABC):
    """A benchmark; the fields of a subclass are its knobs.

    `id` is the name in `task=`; `kind` the way it is run: "labels" (scored over a set of labels),
    "questions" (answered by free generation), "continuation" (a text that goes on) or "lm_eval" (run by
    lm-eval); `shared_context` whether one context serves all queries; `known_answers` whether each question
    has a text along which distributions can be compared ("questions" alone); `units` whether contexts are
    made of several units of text (notes, demonstrations), which could be encoded one by one; `splits` which
    splits there are.
    """

    id: ClassVar[str]
    kind: ClassVar[str]
    shared_context: ClassVar[bool]
    known_answers: ClassVar[bool] = False
    units: ClassVar[bool] = False
    splits: ClassVar[tuple[str, ...]] = SPLITS

    @property
    def has_units(self) -> bool:
        """Whether a context holds more than one unit of text with these knobs."""
        return self.units

    @abstractmethod
    def load(
        self,
        tokenizer: Any,
        *,
        seed: int,
        split: str = "test",
        limit: int | None = None,
        data_dir: str | None = None,
    ) -> Any:
        """Return what `split` holds for a tokenizer; `limit` keeps the first documents.

        A TaskSet ("labels"), a QuestionSet ("questions") or TextSet ("continuation").
        """

    def check_asked(self, split: str, limit: int | None) -> None:
        """Raise UserError for a split that the task lacks, and a limit that leaves nothing."""
        one_of("split", split, SPLITS)
        at_least("limit", limit, 1)
        if split not in self.splits:
            raise UserError(f"task={self.id} has no split={split}: leave split out")

    def check_data(self) -> None:
        """Raise UserError for a file of the user's own that cannot be used, before the model is loaded."""
        return

    def data_sha256(self, data_dir: str | None) -> str | None:
        """Return `TaskSet.data_sha256` of the files in `data_dir`; None where it cannot be told cheaply."""
        return None


def at_least(name: str, value: int | None, minimum: int) -> None:
    """Raise UserError when `value` is less than `minimum`; None passes."""
    if value is not None and value < minimum:
        raise UserError(f"{name}={value} is too small: set {name}={minimum} or more")


def at_most(name: str, value: int | None, maximum: int) -> None:
    """Raise UserError when `value` is more than `maximum`; None passes."""
    if value is not None and value > maximum:
        raise UserError(f"{name}={value} is more than there are: set {name}={maximum} or less")


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise UserError, with the nearest choice, unless `value` is one of `choices`."""
    if value not in choices:
        raise UserError(f"{name}={value} is none of {', '.join(choices)}{suggest(value, choices)}")
