"""What the evaluation of one cell leaves for its record, and the check that the method really acted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvexp.budget import Budget
from kvexp.measure.timing import Stopwatch


class NothingHappened(RuntimeError):
    """A method did not do what it says it does."""


@dataclass(frozen=True)
class Answered:
    """Metrics, cache usage and decoded tokens of one evaluated task."""

    metrics: dict[str, Any]
    cache: dict[str, Any]
    fidelity: dict[str, Any] | None
    decoded: int
    data_sha256: str | None
    notes: Mapping[str, Any] = field(default_factory=dict)  # what the task says of its questions

    def sections(self, watch: Stopwatch) -> dict[str, Any]:
        """Return the record's sections `metrics`, `cache`, `fidelity` and `timing`.

        `prepare_s` holds the encoding of the prefix by methods that prepare (once, for all their traces);
        `encode_s` is then only what it takes to put a cache on the finished memory. `first_token_s` is the
        mean over batches of queries, from an encoded context to logits.
        """
        timing = {
            "prepare_s": watch.seconds("prepare"),
            "encode_s": watch.seconds("encode"),
            "first_token_s": watch.mean("query"),
            "decode_tokens_per_s": watch.per_second("decode", self.decoded),
            "total_s": watch.seconds("total"),
        }
        steps = watch.percentiles("step")
        if steps is not None:  # where pruning makes a step longer, the median hides it
            timing |= {f"step_{name}_s": value for name, value in steps.items()}
        return {"metrics": self.metrics, "cache": self.cache, "fidelity": self.fidelity, "timing": timing}


def check_counters(method: Any, budget: Budget, cache: dict[str, Any]) -> None:
    """Raise NothingHappened when the context exceeds the budget and a declared counter stayed at zero.

    A method that uses no budget has to count whatever the context.
    """
    if method.uses_budget and (budget.rows is None or cache["context_tokens"] <= budget.rows):
        return
    for name in method.expects:
        if cache.get(name, 0):
            continue
        if not method.uses_budget:
            why = _why_nothing(name, cache)
            raise NothingHappened(
                f"{method.id} declares that it counts '{name}', but nothing was counted: {why}"
            )
        raise NothingHappened(
            f"{method.id} declares that it counts '{name}' when the context ({cache['context_tokens']} "
            f"tokens) exceeds the budget ({budget}), but nothing was counted: the method was bypassed"
        )


def _why_nothing(name: str, cache: dict[str, Any]) -> str:
    """Say why a method without a budget counted nothing, and what to change."""
    if name in ("reused", "recomputed") and cache.get("reusable") == 0:
        return "no context holds a unit of text, take a task whose contexts do, such as state_change"
    if name == "reused":
        return "every token of units this short was recomputed, lower method.recompute or take longer units"
    if name == "recomputed":
        return "no token of the units was recomputed, raise method.recompute"
    return f"the method was bypassed in contexts of up to {cache['context_tokens']} tokens"
