"""In-context learning at a smaller budget: BOS and header, then as many whole demonstrations as fit.

This is the papers' "ICL at this budget". `keep=head` takes the first demonstrations (the papers' prefix of the
same data), `keep=tail` the last ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvexp.errors import UserError
from kvexp.methods.base import Method

if TYPE_CHECKING:
    from kvexp.budget import Budget
    from kvexp.prompt import Context


@dataclass(frozen=True)
class Truncate(Method):
    """Keep the header and whole demonstrations, in order, up to the budget in tokens."""

    id: ClassVar[str] = "truncate"
    family: ClassVar[str] = "baseline"

    keep: Literal["tail", "head"] = "tail"

    def select(self, context: Context | Sequence[int], budget: Budget | None) -> Sequence[int]:
        """Return header + the demonstrations that fit; of a plain list of ids, its first or last tokens."""
        ids = list(getattr(context, "ids", context))
        if budget is None or budget.rows is None or len(ids) <= budget.rows:
            return ids
        room = budget.rows - len(getattr(context, "header", ()))
        if room < 0:
            raise UserError(
                f"budget={budget} is smaller than the prompt's header of {budget.rows - room} tokens, "
                f"use budget={budget.rows - room} or more"
            )
        if not hasattr(context, "chunks"):
            return ids[:room] if self.keep == "head" else ids[len(ids) - room :]
        chunks = list(context.chunks)
        kept: list[Sequence[int]] = []
        for chunk in chunks if self.keep == "head" else reversed(chunks):
            if len(chunk) > room:
                break
            room -= len(chunk)
            kept.append(chunk)
        if self.keep == "tail":
            kept.reverse()
        return [*context.header, *(token for chunk in kept for token in chunk)]
