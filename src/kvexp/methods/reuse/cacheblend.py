"""CacheBlend: recompute the tokens whose keys and values differ most from the reused ones."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar, Literal

from kvexp.errors import UserError
from kvexp.methods.reuse.base import RepairMethod

if TYPE_CHECKING:
    from torch import Tensor

    from kvexp.attention.rerotate import Pair
    from kvexp.methods.reuse.forward import Run


@dataclass(frozen=True)
class CacheBlend(RepairMethod):
    """Take the tokens of the context with the largest deviation at the check layer through all later layers.

    Source: Yao et al., "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion"
    (2024, arXiv 2405.16444). Layers before the check layer are computed for all tokens of units; there,
    fresh values are held against reused ones, the tokens that deviate most are chosen once, over all units of
    a context together, and from there on they alone are computed, and overwrite the reused rows.

    `check`: the check layer, counted from 0. Rows of layer 0 depend on the token alone: 0 is for stores in
        few bits, which err in that layer too.
    `by`: the L2 distance over all heads of `values` (the authors' code), or of `both` keys and values.
    `gradual`: choose again in every layer from the check layer on among the tokens that are left, as in the
        paper: the share falls linearly from recompute * (1 + spread) to recompute * (1 - spread), and is
        `recompute` on average. Tokens that fall out are reused from there on.
    `spread`: see there; less where the first share would exceed 1.
    `match`: as many tokens as the `share` gives, or as the `union` of AgentKVShift's two probe sets holds at
        the same share and check layer (single selection only).

    Departures: attention has an explicit mask of positions, and the question is recomputed in full; the
    paper gives no schedule for the shares.
    """

    id: ClassVar[str] = "cacheblend"
    paper: ClassVar[str] = (
        "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion"
    )

    check: int = 1
    by: Literal["values", "both"] = "values"
    gradual: bool = False
    spread: float = 0.5
    match: Literal["share", "union"] = "share"

    def __post_init__(self) -> None:
        """Refuse knobs that make no sense, before anything loads."""
        super().__post_init__()
        if self.check < 0:
            raise UserError(f"method.check={self.check} is not possible: use 0 or more")
        self.refuse_check_of_nothing(self.check)
        if not 0 <= self.spread <= 1:
            raise UserError(f"method.spread={self.spread} is not possible: use a number from 0 to 1")
        if self.gradual and self.match == "union":
            raise UserError("method.gradual=true has no single union to match: use match=share")

    def repair(self, run: Run) -> None:
        """Choose at the check layer, and take the chosen tokens on."""
        from kvexp.methods.reuse.checks import checked, counts_of, require_layer
        from kvexp.methods.reuse.probes import deviations, top_of_contexts

        if not run.geometry.units:
            return
        require_layer(self.id, self.check, run.layers)
        seen = checked(run, self.check)
        work, found, among = seen.work, seen.deviations, run.reusable
        for layer, share in enumerate(self.shares(run.layers - self.check), self.check):
            if layer > self.check and self.gradual:
                found = deviations(run, work, layer, work.peek(layer))
            if layer == self.check or self.gradual:
                counts = self.counts(run, share) if self.gradual else counts_of(self, run, seen)
                among = top_of_contexts(run.geometry, self.deviation(found), counts, among)
                work.keep(among)
                run.report.union = max(run.report.union, work.count)
            work.through(layer)

    def shares(self, layers: int) -> list[Fraction]:
        """Return the share of tokens that each of `layers` layers recomputes."""
        if not self.gradual or layers < 2:
            return [self.share] * layers
        spread = min(Fraction(str(self.spread)), (1 - self.share) / self.share)
        return [self.share * (1 + spread * (1 - Fraction(2 * i, layers - 1))) for i in range(layers)]

    def counts(self, run: Run, share: Fraction) -> list[int]:
        """Return how many tokens each unit stands for at a share."""
        return [-(-share.numerator * unit.length // share.denominator) for unit in run.geometry.units]

    def deviation(self, found: Pair) -> Tensor:
        """Return the deviation [B, C] that decides, from those of keys and values [B, H, C]."""
        from kvexp.methods.reuse.probes import both, joint

        return joint(found[1]) if self.by == "values" else both(found)
