"""In-context learning at a smaller budget: BOS and header, then as many whole demonstrations as fit.

This is the papers' "ICL at this budget". `keep=head` takes the first demonstrations (the papers' prefix of
the same data), `keep=tail` the last ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvexp.budget import Budget
from kvexp.errors import UserError
from kvexp.methods.base import Method
from kvexp.prompt import Context


@dataclass(frozen=True)
class Truncate(Method):
    """Keep the header and whole demonstrations, in order, up to the budget in tokens."""

    id: ClassVar[str] = "truncate"
    family: ClassVar[str] = "baseline"
    by_head: ClassVar[bool] = True

    keep: Literal["tail", "head"] = "tail"

    def select(self, context: Context | Sequence[int], budget: Budget | int | str | None) -> Sequence[int]:
        """Return header + the demonstrations that fit; of a plain list of ids, its first or last tokens."""
        if not isinstance(context, Context):
            context = Context((), tuple((token,) for token in context))
        budget = Budget(None) if budget is None else Budget.parse(budget, len(context))
        if budget.rows is None or len(context) <= budget.rows:
            return context.ids
        room = budget.rows - len(context.header)
        if room < 0:
            raise UserError(
                f"budget={budget} is smaller than the prompt's header of {len(context.header)} tokens, "
                f"use budget={len(context.header)} or more"
            )
        chunks = list(context.chunks) if self.keep == "head" else list(reversed(context.chunks))
        kept: list[Sequence[int]] = []
        for chunk in chunks:
            if len(chunk) > room:
                break
            room -= len(chunk)
            kept.append(chunk)
        if self.keep == "tail":
            kept.reverse()
        return [*context.header, *(token for chunk in kept for token in chunk)]
