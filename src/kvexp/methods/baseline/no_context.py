"""The floor: the model sees the header of the prompt (BOS and description) and none of the demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvexp.methods.base import Method

if TYPE_CHECKING:
    from kvexp.budget import Budget
    from kvexp.prompt import Context


@dataclass(frozen=True)
class NoContext(Method):
    """Encode the header alone. A plain list of ids has no header, so nothing of it is kept."""

    id: ClassVar[str] = "no_context"
    family: ClassVar[str] = "baseline"
    by_head: ClassVar[bool] = True
    uses_budget: ClassVar[bool] = False

    def select(self, context: Context | Sequence[int], budget: Budget | int | str | None) -> Sequence[int]:
        """Return the header's ids."""
        return getattr(context, "header", ())
