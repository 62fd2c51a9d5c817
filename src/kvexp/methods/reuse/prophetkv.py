"""ProphetKV: recompute the tokens that the question reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvexp.errors import UserError
from kvexp.methods.reuse.base import RepairMethod

if TYPE_CHECKING:
    from kvexp.methods.reuse.forward import Run


@dataclass(frozen=True)
class ProphetKV(RepairMethod):
    """Let the question run over the reused rows, and recompute what it attends to from the first layer on.

    Source: "ProphetKV", as it is described by those who compare with it; neither its paper nor its code could
    be read. Stage 1 runs the question alone through all layers over the placed rows; a token's importance is
    the softmax weight over all tokens of the context, as the mean over question tokens, query heads and
    layers. Stage 2 recomputes the most important tokens of the context, of all units together, through all
    layers. The question itself is then run again, as every query is.

    `match`: as many tokens as the `share` gives, or as the `union` of AgentKVShift's two probe sets holds at
        the same share (which costs the layers up to its check layer, run apart, and is meant for
        comparisons).
    `check`: that check layer, counted from 0.

    Departure: ceil(share * n) for each unit instead of the floor over the context, so that methods of the
    same share recompute the same number of tokens.
    """

    id: ClassVar[str] = "prophetkv"
    paper: ClassVar[str] = "ProphetKV"
    needs_query: ClassVar[bool] = True

    match: Literal["share", "union"] = "share"
    check: int = 1

    def __post_init__(self) -> None:
        """Refuse knobs that make no sense, before anything loads."""
        super().__post_init__()
        if self.check < 0:
            raise UserError(f"method.check={self.check} is not possible: use 0 or more")
        if self.match == "union":
            self.refuse_check_of_nothing(self.check)

    def repair(self, run: Run) -> None:
        """Choose by the question, and recompute."""
        from kvexp.methods.reuse.checks import counts_of, require_layer
        from kvexp.methods.reuse.probes import relevance, top_of_contexts

        if not run.geometry.units:
            return
        if self.match == "union":
            require_layer(self.id, self.check, run.layers)
        read = relevance(run)
        chosen = top_of_contexts(run.geometry, read, counts_of(self, run, None))
        work = run.start(chosen)
        run.report.union = work.count
        for layer in range(run.layers):
            work.through(layer)
