"""Ada-KV: heads whose attention is spread out get rows of those whose attention is concentrated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvexp.errors import UserError
from kvexp.methods.eviction.base import EvictionMethod
from kvexp.methods.eviction.over_base import OverBase

if TYPE_CHECKING:
    from torch import Tensor

    from kvexp.methods.eviction.view import View

OWN = ("encode", "during")  # a base that does one of these in its own way cannot be wrapped


@dataclass(frozen=True)
class AdaKV(OverBase):
    """Divide the rows of a layer among its KV heads by the scores of `base`, over all heads at once.

    Source: Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
    Inference" (2024, arXiv 2407.11550). The rows with the best scores in the layer are counted for each head,
    b of them; a head with C rows of an equal division then keeps its best (1 - alpha) b + alpha C. Rows that
    are always kept (the window of SnapKV) are no part of the division. Over pyramidkv, layers have its
    budgets.

    `base`: the method that scores (`OverBase` says which of its knobs hold).
    `alpha`: share of an equal division that is safe; 1 is the base itself, 0 divides by the scores alone.
    `normalize`: a head's scores are first multiplied by the share of their sum that its best C rows hold.

    alpha=0.2, and the window, kernel and pool of the base are what the repository's scripts run (where
    grouped queries join before pooling: base={name: snapkv, merge: attention}); its function's default is
    alpha=0.5. Departures: the repository rounds each head on its own, here the largest remainders are rounded
    up, so that heads hold exactly the layer's rows together; kvpress instead fixes alpha C rows of each head
    and gives the others to the best scores.
    """

    id: ClassVar[str] = "adakv"
    paper: ClassVar[str] = (
        "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference"
    )
    year: ClassVar[str] = "2024"
    reads: ClassVar[tuple[str, ...]] = ("scores of its base",)
    unit: ClassVar[str] = "KV head, head budgets"
    divides: ClassVar[bool] = True

    alpha: float = 0.2
    normalize: bool = False

    def __post_init__(self) -> None:
        """Refuse a base whose scores do not tell heads apart, and knobs of it that would be ignored."""
        if not 0 <= self.alpha <= 1:
            raise UserError(f"method.alpha={self.alpha} is no share: use a number from 0 to 1")
        super().__post_init__()

    def refusal(self) -> str:
        """Return why the base cannot serve."""
        base, kind, why = self.base, type(self.base), ""
        if base.unit == "layer":
            why = "lets all heads of a layer hold the same tokens"
        elif base.scope == "model":
            why = "compares the scores of all layers"
        elif base.divides or any(getattr(kind, name) is not getattr(EvictionMethod, name) for name in OWN):
            why = "divides rows or reads the context in a way of its own"
        return why and f"{why}: take another base for adakv, such as snapkv"

    def allot(
        self, scores: Tensor, targets: Sequence[int], view: View, always: Tensor | None
    ) -> list[list[int]]:
        """Return how many rows each head of each sequence keeps; they sum to H times the target."""
        import torch

        from kvexp.methods.eviction.selection import share

        free = torch.ones_like(scores, dtype=torch.bool) if view.valid is None else view.valid
        pinned = torch.zeros_like(free) if always is None else free & always
        free = free & ~pinned
        fixed, there = pinned.sum(-1).tolist(), free.sum(-1).tolist()
        totals = [max(0, view.heads * n - sum(heads)) for n, heads in zip(targets, fixed, strict=True)]
        equal = [share(total, [1] * view.heads, most) for total, most in zip(totals, there, strict=True)]
        best = best_of_all(self._comparable(scores, free, equal), free, [sum(heads) for heads in equal])
        rows = []
        for b, total in enumerate(totals):
            weights = [(1 - self.alpha) * n + self.alpha * c for n, c in zip(best[b], equal[b], strict=True)]
            rows.append([n + more for n, more in zip(fixed[b], share(total, weights, there[b]), strict=True)])
        return rows

    def _comparable(self, scores: Tensor, free: Tensor, equal: list[list[int]]) -> Tensor:
        """Return the scores that the heads are compared by, [B, H, S]."""
        import torch

        if not self.normalize:
            return scores
        ours = scores.masked_fill(~free, 0.0)
        if bool((ours < 0).any()):
            raise UserError(
                "method.normalize=true needs scores that are shares of attention, and those of"
                f" method.base={self.base.id} can be negative: leave it out, or take another base"
            )
        ranked = ours.sort(-1, descending=True).values
        most = torch.tensor(equal, device=ours.device)[..., None]
        first = torch.arange(ours.shape[-1], device=ours.device) < most
        return scores * ((ranked * first).sum(-1) / ranked.sum(-1).clamp(min=1e-30))[..., None]


def best_of_all(scores: Tensor, free: Tensor, totals: Sequence[int]) -> list[list[int]]:
    """Return how many of the best `totals[b]` rows of all heads together lie in each head.

    Args:
        scores: [B, H, S]; ties go to the lower head, then to the lower index.
        free: [B, H, S] bool, rows that count.
        totals: for each sequence, at most as many as there are rows that count.
    """
    import torch

    batch, heads, rows = scores.shape
    order = scores.masked_fill(~free, -torch.inf).flatten(1).argsort(dim=-1, descending=True, stable=True)
    taken = (
        torch.arange(heads * rows, device=scores.device) < torch.tensor(totals, device=scores.device)[:, None]
    )
    counts = torch.zeros(batch, heads, dtype=torch.long, device=scores.device)
    return counts.scatter_add(1, order // rows, taken.long()).tolist()
