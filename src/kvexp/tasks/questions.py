"""Tasks that are answered by free generation; each question brings its own context, or all share one.

A question's prompt is its context followed by its query. The context can be encoded on its own, so that a
method may compress it before the query is known; the query has at least one token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvexp.errors import UserError
from kvexp.prompt import Context
from kvexp.tasks.base import Trace, TraceSource, at_least

Score = Callable[["Question", str], dict[str, float]]
Overall = Callable[[Sequence[dict[str, Any]]], dict[str, Any]]


@dataclass(frozen=True)
class Question:
    """One prompt and what is expected of its answer.

    `expected` are the gold answers (one, or several that the task's metric knows how to use), `group` the
    part of the benchmark that it belongs to ("niah_single_1", "depth 8"), shown beside the total.
    `answer_ids` is what the model is taught when its answer is teacher-forced (log-probability of the gold
    answer); empty where the task has no such text.
    """

    id: str
    sample: int
    context: Context
    query: str
    query_ids: tuple[int, ...]
    expected: tuple[str, ...]
    max_new_tokens: int
    group: str = ""
    answer_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class QuestionSet:
    """The questions of a split for one tokenizer, and how an answer is scored.

    `score(question, text)` returns the metrics named in `metrics`, each from 0 to 1, the first of them the
    headline. `stop` are strings that end an answer. `notes` are facts for the record. `overall` makes metrics
    of all samples together, which are no means over questions.
    `context` is the one that all questions stand on, where a task has one, and `trace_source` draws traces.
    """

    questions: list[Question]
    score: Score
    metrics: tuple[str, ...]
    data_sha256: str
    stop: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    overall: Overall | None = None
    context: Context | None = None
    trace_source: TraceSource | None = field(default=None, repr=False, compare=False)

    def traces(self, n: int, labels: str, seed: int) -> list[Trace]:
        """Return `n` traces that are no questions of the set, "gold" (with answers) or "none".

        Raises UserError for other labels, for a task without traces, and where fewer exist.
        """
        at_least("calibration.n", n, 1)
        if labels not in ("gold", "none"):
            raise UserError(
                f"calibration.labels={labels} needs a set of labels, and this task is answered freely: set"
                " calibration.labels=none or gold"
            )
        if self.trace_source is None:
            raise UserError("this task has no traces: set calibration.task to the name of one that has")
        return self.trace_source.traces(n, labels, seed)
