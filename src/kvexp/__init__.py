"""kvexp: what is lost, and gained, when a language model does not attend to the whole of its context.

As a library, five names are enough:

    load(model)                                   a model and its tokenizer
    method(name, **knobs)                         a method; `.encode` gives a cache, `.attach` a `with` block
    prepare(method, model, context, traces, ...)  the memory of a method that learns from traces
    Budget(rows)                                  how much of the context may be held
    Context(header, chunks)                       a context in parts, where a method chooses among them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvexp.budget import Budget
from kvexp.errors import UserError
from kvexp.prompt import Context

__all__ = ["Budget", "Context", "UserError", "load", "method", "prepare"]


def load(name: str = "smollm2-135m", **changes: Any) -> Any:
    """Return a `LoadedModel` (model, tokenizer, ...) by the name of a YAML file in conf/model.

    `changes` are keys of that file, such as `dtype="bfloat16"` or, for name="hf", `id="org/model"`.
    """
    import kvexp.library
    import kvexp.model

    return kvexp.model.load(kvexp.library.model_spec(name, changes))


def method(name: str, **knobs: Any) -> Any:
    """Return a method by the name of its YAML file in conf/method, with some knobs changed.

    Raises UserError, with the nearest right name, for an unknown method or knob.
    """
    import kvexp.library

    return kvexp.library.method(name, knobs)


def prepare(
    method: Any,
    model: Any,
    context: Context | Sequence[int],
    traces: Sequence[Sequence[int]],
    budget: Budget | int | str,
    seed: int = 0,
) -> Any:
    """Return the memory of `context` that `method` learns from `traces` (token ids that could follow it).

    `budget` is a Budget, or is written as on the command line: 64, "4k", "20%" (of the context) or "full".
    """
    import kvexp.library

    return kvexp.library.prepare(method, model, context, traces, budget, seed)
