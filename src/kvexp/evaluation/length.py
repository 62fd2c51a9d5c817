"""A warning where texts are longer than those that a model was made for."""

from __future__ import annotations

import logging
from typing import Any

from kvexp.tasks.base import Task
from kvexp.tasks.questions import Question

log = logging.getLogger(__name__)
_KNOBS = ("context_tokens", "length", "k", "steps", "names")  # by which tasks say how long a prompt is


def warn_of_length(loaded: Any, longest: int, remedy: str = "lower task.context_tokens") -> None:
    """Warn when texts of up to `longest` tokens, answers included, exceed the model's context."""
    if longest > (loaded.context_limit or longest):
        log.warning(
            "texts of up to %d tokens exceed the %d that this model was made for: %s",
            longest,
            loaded.context_limit,
            remedy,
        )


def warn_of_questions(loaded: Any, task: Task, questions: list[Question]) -> None:
    """Warn when a question's context, query and longest answer exceed the model's context together."""
    prompts = [len(one.context) + len(one.query_ids) for one in questions]
    answers = [max(one.max_new_tokens, len(one.answer_ids)) for one in questions]
    longest = max(map(sum, zip(prompts, answers, strict=True)))
    warn_of_length(loaded, longest, _remedy(task, max(prompts) < (loaded.context_limit or longest)))


def _remedy(task: Task, prompts_fit: bool) -> str:
    """Say which of a task's knobs makes its texts shorter."""
    if prompts_fit and hasattr(task, "max_new_tokens"):
        return "lower task.max_new_tokens"
    if getattr(getattr(task, "notes", None), "id", "") == "none":
        return "take a memory that finds a few units, such as task.notes=amem"
    named = [f"task.{name}" for name in _KNOBS if hasattr(task, name)]
    return f"lower {named[0]}" if named else "take a model with a longer context"
