"""Ada-KV: heads whose attention is spread out get rows of those whose attention is concentrated."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from kvexp.check import show
from kvexp.errors import UserError
from kvexp.methods.base import Calibration
from kvexp.methods.eviction.base import EvictionMethod
from kvexp.methods.eviction.snapkv import SnapKV

if TYPE_CHECKING:
    from torch import Tensor

    from kvexp.budget import Budget
    from kvexp.methods.eviction.view import View

WHEN = ("prefill", "query_aware", "interval", "trigger", "smooth")  # knobs that the base does not decide
# What a class says of itself, and says for the base here.
FOLLOWED = ("observes", "follows", "stepwise", "needs_calibration", "learns_from", "taps", "exact", "expects")
OWN = ("encode", "allot", "during")  # a base that does one of these in its own way cannot be wrapped


@dataclass(frozen=True)
class AdaKV(EvictionMethod):
    """Divide the rows of a layer among its KV heads by the scores of `base`, over all heads at once.

    Source: Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
    Inference" (2024, arXiv 2407.11550). The rows with the best scores in the layer are counted for each head,
    b of them; a head with C rows of an equal division then keeps its best (1 - alpha) b + alpha C. Rows that
    are always kept (the window of SnapKV) are no part of the division. Over pyramidkv, layers have its
    budgets.

    `base`: the method that scores: a name, or {name: snapkv, window: 8}. Its knobs hold, but `prefill`,
        `query_aware`, `interval`, `trigger` and `smooth` are set here. `sinks`, `recent`, `protect_prompt`
        and `group=max` hold where either says so.
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

    base: EvictionMethod = field(default_factory=SnapKV)
    alpha: float = 0.2
    normalize: bool = False

    def __post_init__(self) -> None:
        """Refuse a base whose scores do not tell heads apart, and knobs of it that would be ignored."""
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise UserError(f"method.alpha={self.alpha} is no share: use a number from 0 to 1")
        self._refuse_base()
        for name in FOLLOWED:
            object.__setattr__(self, name, getattr(self.base, name))

    def _refuse_base(self) -> None:
        base, kind = self.base, type(self.base)
        why = ""
        if base.unit == "layer":
            why = "lets all heads of a layer hold the same tokens"
        elif base.scope == "model":
            why = "compares the scores of all layers"
        elif any(getattr(kind, name) is not getattr(EvictionMethod, name) for name in OWN):
            why = "divides rows or reads the context in a way of its own"
        if why:
            raise UserError(f"method.base={base.id} {why}: take another base for adakv, such as snapkv")
        defaults = {knob.name: knob.default for knob in fields(base)}
        for name in WHEN:
            given = getattr(base, name)
            if given != defaults[name]:
                raise UserError(
                    f"{name}={show(given)} of method.base has no effect: write method.{name}={show(given)}"
                )

    @cached_property
    def scorer(self) -> EvictionMethod:
        """The base, with what is protected here too."""
        base = self.base
        return replace(
            base,
            sinks=max(self.sinks, base.sinks),
            recent=max(self.recent, base.recent),
            protect_prompt=self.protect_prompt or base.protect_prompt,
            group="max" if self.group == "max" else base.group,
        )

    def bound(self, model: Any, memory: Any) -> EvictionMethod:
        """Return the method with a base that serves this model and memory."""
        bound = copy.copy(self)
        object.__setattr__(bound, "scorer", self.scorer.bound(model, memory))
        return bound

    @property
    def window_size(self) -> int:
        """How many of the latest queries the base reads."""
        return self.scorer.window_size

    def smallest_budget(self) -> int:
        """Return the fewest rows with which the base has a choice to make."""
        return self.scorer.smallest_budget()

    def observe(self, view: View) -> None:
        """Let the base see a layer after a forward."""
        self.scorer.observe(view)

    def score(self, view: View) -> Tensor:
        """Return the scores of the base."""
        return self.scorer.score(view)

    def combine(self, scores: Tensor, view: View) -> Tensor:
        """Return the base's scores of the stored heads, [B, H, S]."""
        return self.scorer.combine(scores, view)

    def always(self, view: View) -> Tensor | None:
        """Return the rows that the base keeps before any other."""
        return self.scorer.always(view)

    def evicted(self, view: View) -> None:
        """Let the base do what remains."""
        self.scorer.evicted(view)

    def layer_rows(self, layer: int, n_layers: int, rows: int, length: int) -> int:
        """Return the rows that the base gives to a layer."""
        return self.scorer.layer_rows(layer, n_layers, rows, length)

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

    def memory_class(self) -> Any:
        """Return the class of the base's memory."""
        return self.base.memory_class()

    def memory_facts(self, budget: Budget, seed: int) -> dict[str, Any]:
        """Return what decides what the base's memory holds."""
        return {"base": self.base.id, **self.base.memory_facts(budget, seed)}

    def sample_knobs(self) -> dict[str, Any]:
        """Return the base's knobs that decide what is collected."""
        return self.base.sample_knobs()

    def prepare(self, model: Any, calibration: Calibration, budget: Budget) -> Any:
        """Let the base learn."""
        return self.base.prepare(model, calibration, budget)

    @contextmanager
    def attach(self, model: Any, memory: Any = None) -> Iterator[None]:
        """Switch `model` over as the base does."""
        with self.base.attach(model, memory):
            yield


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
