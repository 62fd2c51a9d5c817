"""Tasks whose documents each bring their own context and are answered by free generation.

A question's prompt is its context followed by its query. The context can be encoded on its own, so that a
method may compress it before the query is known; the query has at least one token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvexp.prompt import Context

Score = Callable[["Question", str], dict[str, float]]


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
    headline. `stop` are strings that end an answer. `notes` are facts for the record.
    """

    questions: list[Question]
    score: Score
    metrics: tuple[str, ...]
    data_sha256: str
    stop: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
