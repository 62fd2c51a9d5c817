"""Everything stays: the mechanism of eviction without an eviction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvexp.methods.eviction.bare import Bare

if TYPE_CHECKING:
    from kvexp.budget import Budget


@dataclass(frozen=True)
class KeepAll(Bare):
    """Keep every row in a cache that could let rows leave; the budget is ignored.

    What it answers is what `full` answers: a difference between the two is what the mechanism itself costs.
    """

    id: ClassVar[str] = "keep_all"
    uses_budget: ClassVar[bool] = False
    expects: ClassVar[tuple[str, ...]] = ()
    unit: ClassVar[str] = "layer"

    prefill: ClassVar[Literal["end", "chunks", "off"]] = "off"  # type: ignore[misc]

    def check_budget(self, budget: Budget) -> None:
        """Accept any budget."""
