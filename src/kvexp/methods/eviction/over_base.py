"""What eviction methods that let another one score have in common: they ask it, and hand its answers on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvexp.check import show
from kvexp.errors import UserError
from kvexp.methods.base import Method
from kvexp.methods.eviction.base import EvictionMethod
from kvexp.methods.eviction.snapkv import SnapKV
from kvexp.methods.over import Over

if TYPE_CHECKING:
    from torch import Tensor

    from kvexp.methods.eviction.view import View

WHEN = ("prefill", "query_aware", "interval", "trigger", "smooth")  # knobs that the base does not decide
# What a class says of itself, and says for the base here.
FOLLOWED = ("observes", "follows", "stepwise", "taps", "exact", "expects")


@dataclass(frozen=True)
class OverBase(Over, EvictionMethod):
    """Base of methods that keep by the scores of `base`, a name or {name: snapkv, window: 8}.

    The base's knobs hold, but `prefill`, `query_aware`, `interval`, `trigger` and `smooth` are set here.
    `sinks`, `recent`, `protect_prompt` and `group=max` hold where either says so. What the base learns from
    calibration is shared with runs of the base alone.
    """

    base: EvictionMethod = field(default_factory=SnapKV)

    def __post_init__(self) -> None:
        """Refuse a base that cannot serve, its knobs that would be ignored, and protection it contradicts."""
        super().__post_init__()
        why = self.refusal()
        if why:
            raise UserError(f"method.base={self.base.id} {why}")
        for name, usual in ((knob.name, knob.default) for knob in fields(self.base) if knob.name in WHEN):
            given = getattr(self.base, name)
            if given != usual:
                raise UserError(
                    f"{name}={show(given)} of method.base has no effect: write method.{name}={show(given)}"
                )
        self.follow(*FOLLOWED)

    def refusal(self) -> str:
        """Return why the base cannot serve, and what to take instead; "" where it can."""
        return ""

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
    def learner(self) -> Method:
        """The base."""
        return self.scorer

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

    @contextmanager
    def attach(self, model: Any, memory: Any = None) -> Iterator[None]:
        """Switch `model` over as the base does."""
        with self.base.attach(model, memory):
            yield
