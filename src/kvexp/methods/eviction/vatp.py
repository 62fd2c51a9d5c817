"""Value-aware pruning: another method's attention counts as much as the value that it carries is large."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from kvexp.methods.eviction.base import EvictionMethod
from kvexp.methods.eviction.h2o import H2O
from kvexp.methods.eviction.over_base import OverBase

if TYPE_CHECKING:
    from torch import Tensor

    from kvexp.methods.eviction.view import View

ATTENTION = {"attention of every step", "window queries"}  # what a base reads whose scores are attention


@dataclass(frozen=True)
class VATP(OverBase):
    """Keep by the score of `base` times the L1 norm of the row's value; the first `sinks` tokens stay.

    Source: Guo et al., "Attention Score is Not All You Need for Token Importance Indicator in KV Cache
    Reduction: Value Also Matters" (2024, arXiv 2406.12335). The paper weighs H2O (the default) and a
    Scissorhands-like importance: base={name: h2o, window: 400, recent_percent: null, recent: 10}. It forces
    the first 20 tokens, which draw attention though their values are small, and keeps half of the budget
    recent. Its models have no shared KV heads; here the value is that of the KV head, and where all heads
    share one latent row, each head's value weighs and heads join afterwards.

    `base`: the method whose scores are weighed (`OverBase` says which of its knobs hold). It may read nothing
        but attention, so that its scores are not negative.
    """

    id: ClassVar[str] = "vatp"
    paper: ClassVar[str] = (
        "Attention Score is Not All You Need for Token Importance Indicator in KV Cache Reduction: Value"
        " Also Matters"
    )
    year: ClassVar[str] = "2024"
    reads: ClassVar[tuple[str, ...]] = ("scores of its base", "values")

    interval: int | None = 1
    sinks: int = 20
    base: EvictionMethod = field(default_factory=H2O)

    def refusal(self) -> str:
        """Return why the base cannot serve: its scores are no attention."""
        if self.base.reads and set(self.base.reads) <= ATTENTION:
            return ""
        return "has no plain attention that values could weigh: take h2o, snapkv or tova"

    def score(self, view: View) -> Tensor:
        """Return the base's score times the L1 norm of each value, [B, Hq or Hk, S]."""
        scores = self.scorer.score(view)
        norms = view.values.to(scores.dtype).abs().sum(-1)
        if scores.shape[1] > norms.shape[1]:
            norms = norms.repeat_interleave(scores.shape[1] // norms.shape[1], dim=1)
        return scores * norms
