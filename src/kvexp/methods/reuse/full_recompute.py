"""Full recompute: what every method of reuse is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvexp.methods.reuse.base import ReuseMethod

if TYPE_CHECKING:
    from kvexp.methods.reuse.forward import Run


@dataclass(frozen=True)
class FullRecompute(ReuseMethod):
    """Compute every token of the context, in the way in which the other methods compute some.

    The rows are those of `full`; what differs is the code that makes them, so that times can be compared.
    """

    id: ClassVar[str] = "full_recompute"
    expects: ClassVar[tuple[str, ...]] = ("recomputed",)

    def repair(self, run: Run) -> None:
        """Take all tokens through all layers."""
        work = run.start(run.geometry.in_context())
        run.report.union = work.count
        for layer in range(run.layers):
            work.through(layer)
