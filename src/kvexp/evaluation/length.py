"""Texts that are longer than those that a model was made for: refused where it would have to read them."""

from __future__ import annotations

import logging
from typing import Any

from kvexp.errors import UserError
from kvexp.prompt import Context
from kvexp.tasks.base import Task
from kvexp.tasks.questions import Question

log = logging.getLogger(__name__)
_KNOBS = ("context_tokens", "length", "k", "steps", "names")  # by which tasks say how long a prompt is


def held_tokens(session: Any, context: Context) -> int:
    """Return how many tokens stand before a query on `context`, as positions count them.

    Raises UserError where the method would have the model read more than it was made for.
    """
    if session.memory is not None and hasattr(session.memory, "seen"):  # built in parts, where it had to be
        return int(session.memory.seen)
    read, limit = len(session.method.select(context, session.budget)), session.loaded.context_limit
    if limit is not None and read > limit and not session.method.endless:
        raise UserError(
            f"a context of {read} tokens exceeds the {limit} that this model was made for: take method=asm,"
            " which reads it in parts (for tasks with one context), method=truncate, a shorter context, or a"
            " model with a longer one"
        )
    return read


def warn_of_length(loaded: Any, longest: int, remedy: str = "lower task.context_tokens") -> None:
    """Warn when texts of up to `longest` tokens, answers included, exceed the model's context."""
    if longest > (loaded.context_limit or longest):
        log.warning(
            "texts of up to %d tokens exceed the %d that this model was made for: %s",
            longest,
            loaded.context_limit,
            remedy,
        )


def warn_of_questions(session: Any, task: Task, questions: list[Question]) -> None:
    """Warn when a question's context, query and longest answer exceed the model's context together."""
    loaded, contexts = session.loaded, {one.context.key: one.context for one in questions}
    held = {key: held_tokens(session, context) for key, context in contexts.items()}
    prompts = [held[one.context.key] + len(one.query_ids) for one in questions]
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
