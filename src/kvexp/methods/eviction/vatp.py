"""Value-aware pruning: another method's attention counts as much as the value that it carries is large."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from kvexp.check import show
from kvexp.errors import UserError
from kvexp.methods.eviction.base import EvictionMethod
from kvexp.methods.eviction.h2o import H2O

if TYPE_CHECKING:
    from torch import Tensor

    from kvexp.methods.eviction.view import View

ATTENTION = {"attention of every step", "window queries"}  # what a base reads whose scores are attention
WHEN = ("prefill", "query_aware", "interval", "trigger", "smooth")  # knobs that the base does not decide


@dataclass(frozen=True)
class VATP(EvictionMethod):
    """Keep by the score of `base` times the L1 norm of the row's value; the first `sinks` tokens stay.

    Source: Guo et al., "Attention Score is Not All You Need for Token Importance Indicator in KV Cache
    Reduction: Value Also Matters" (2024, arXiv 2406.12335). The paper weighs H2O (the default) and a
    Scissorhands-like importance: base={name: h2o, window: 400, recent_percent: null, recent: 10}. It forces
    the first 20 tokens, which draw attention though their values are small, and keeps half of the budget
    recent. Its models have no shared KV heads; here the value is that of the KV head, and where all heads
    share one latent row, each head's value weighs and heads join afterwards.

    `base`: the method whose scores are weighed: a name, or {name: NAME, knob: value}. It may read nothing but
        attention, so that its scores are not negative. Its knobs hold, but `prefill`, `query_aware`,
        `interval`, `trigger` and `smooth` are set here. `sinks`, `recent`, `protect_prompt` and `group=max`
        hold where either says so.
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

    def __post_init__(self) -> None:
        """Refuse a base whose scores are no attention, and knobs of it that would be ignored."""
        super().__post_init__()
        base = self.base
        if not base.reads or not set(base.reads) <= ATTENTION:
            raise UserError(
                f"method.base={base.id} has no plain attention that values could weigh: take h2o, snapkv"
                " or tova"
            )
        for name, usual in ((knob.name, knob.default) for knob in fields(base) if knob.name in WHEN):
            given = getattr(base, name)
            if given != usual:
                raise UserError(
                    f"{name}={show(given)} of method.base has no effect: write method.{name}={show(given)}"
                )
        # What a class says of itself, and the base says here; `scorer` refuses protection that contradicts.
        for name in ("observes", "follows", "stepwise"):
            object.__setattr__(self, name, getattr(self.scorer, name))

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

    @property
    def window_size(self) -> int:
        """How many of the latest queries the base reads."""
        return self.scorer.window_size

    def smallest_budget(self) -> int:
        """Return the fewest rows with which the base, and the sinks, leave a choice."""
        return self.scorer.smallest_budget()

    def observe(self, view: View) -> None:
        """Let the base see a layer after a forward."""
        self.scorer.observe(view)

    def score(self, view: View) -> Tensor:
        """Return the base's score times the L1 norm of each value, [B, Hq or Hk, S]."""
        scores = self.scorer.score(view)
        norms = view.values.to(scores.dtype).abs().sum(-1)
        if scores.shape[1] > norms.shape[1]:
            norms = norms.repeat_interleave(scores.shape[1] // norms.shape[1], dim=1)
        return scores * norms

    def combine(self, scores: Tensor, view: View) -> Tensor:
        """Return scores of the stored heads, [B, H, S], as the base does."""
        return self.scorer.combine(scores, view)

    def always(self, view: View) -> Tensor | None:
        """Return the rows that the base keeps before any other, and the sinks."""
        return self.scorer.always(view)

    def evicted(self, view: View) -> None:
        """Let the base do what remains."""
        self.scorer.evicted(view)

    def layer_rows(self, layer: int, n_layers: int, rows: int, length: int) -> int:
        """Return the rows that the base gives to a layer."""
        return self.scorer.layer_rows(layer, n_layers, rows, length)
