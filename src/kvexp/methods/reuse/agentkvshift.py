"""AgentKVShift: recompute a few probes of each unit, and shift the rest by what the probes moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvexp.errors import UserError
from kvexp.methods.reuse.base import RepairMethod

if TYPE_CHECKING:
    from kvexp.methods.reuse.forward import Run


@dataclass(frozen=True)
class AgentKVShift(RepairMethod):
    """Treat the error of a unit's reused rows as one shared shift, and measure it on its probes.

    Source: "AgentKVShift" (2026, arXiv 2607.21604), which has no public code. All tokens of units run up to
    the check layer, where d_K and d_V are the L2 distances of fresh from reused keys and values. In a unit of
    n tokens the b = ceil(recompute * n) largest of each are its probes S_K and S_V; w = min(d, 1) weighs its
    tokens. In every layer from there on the probes are recomputed against the corrected rows of all others,
    the mean residual over S_K (S_V) is the shift of keys (values), probes take their fresh rows, and every
    other token takes `reused + w * shift`. Probes and weights stay, shifts are each layer's own.

    What the paper leaves open is a knob; defaults are the paper's rule where it has one.

    `check`: the check layer, counted from 0. In layer 0 keys and values depend on the token alone, so that
        nothing differs there once keys have been moved exactly: 0 is for what measures nothing there, and
        for stores in few bits, which err in that layer too.
    `probes`: chosen by `divergence` at the check layer, at `random` (from `seed` and the unit's text), or by
        what the `query` reads of the reused rows (`kvexp.methods.reuse.probes.relevance`).
    `sets`: keys and values have `separate` probes, or `shared` ones (divergence: by both distances together).
    `union_fresh`: a probe of either set takes fresh keys and values, which are computed anyway.
    `weights`: `clipped` w = min(d / clip, 1), or `none`: every token gets the whole shift.
    `weights_by`: d over all heads (`joint`), or for each head on its own (`per_head`).
    `shift`: corrects `both`, `keys` or `values` alone, or `none`: then probes are only refreshed.
    `average`: residuals of keys are averaged before rotation (`pre`) or at their positions (`post`, which the
        paper's formulas name). `pre` is the default here: what moved a key moved it before its rotation, and
        turned to unlike positions equal residuals cancel in their mean.
    `mean`: over the `probes`, or over all tokens of the unit (`oracle`, by full recompute: a diagnostic).
    `shrink`: `james_stein` multiplies a mean by max(0, 1 - se^2 / |mean|^2), se its standard error, for each
        unit, head and layer; a single probe then shifts nothing.
    `at_check`: at the check layer itself tokens are corrected as elsewhere (`shift`), or all take the fresh
        rows that exist there (`fresh`).
    `first`: so many tokens at the start of a unit are always fresh, beside its probes, and in no mean.
    `drift`: scales a unit's shift by min(1, m / drift), m its mean d_K at the check layer (over the probes,
        where nothing else was computed there); null: no scaling.
    `match`: b is the `share`, or the `union` of the two sets that divergence would have chosen (found apart
        where the method has no check layer of its own).

    In multi-head latent attention, keys are the shared rotated key and values the latent, which gives the
    values and the rest of the keys.
    """

    id: ClassVar[str] = "agentkvshift"
    paper: ClassVar[str] = "AgentKVShift"

    check: int = 1
    probes: Literal["divergence", "random", "query"] = "divergence"
    sets: Literal["separate", "shared"] = "separate"
    union_fresh: bool = False
    weights: Literal["clipped", "none"] = "clipped"
    clip: float = 1.0
    weights_by: Literal["joint", "per_head"] = "joint"
    shift: Literal["both", "keys", "values", "none"] = "both"
    average: Literal["pre", "post"] = "pre"
    mean: Literal["probes", "oracle"] = "probes"
    shrink: Literal["none", "james_stein"] = "none"
    at_check: Literal["shift", "fresh"] = "shift"
    first: int = 0
    drift: float | None = None
    match: Literal["share", "union"] = "share"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse knobs that make no sense, before anything loads."""
        super().__post_init__()
        for name in ("check", "first"):
            if getattr(self, name) < 0:
                raise UserError(f"method.{name}={getattr(self, name)} is not possible: use 0 or more")
        for name in ("clip", "drift"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"method.{name}={value} is not possible: use a number above 0, such as 1.0")
        if self.reads_all or self.match == "union" or self.drift is not None:
            self.refuse_check_of_nothing(self.check)

    @property
    def needs_query(self) -> bool:  # type: ignore[override]
        """Whether probes are chosen by the question."""
        return self.probes == "query"

    @property
    def reads_all(self) -> bool:
        """Whether all tokens of units run up to the check layer, and take the fresh rows before it."""
        clipped = self.weights == "clipped" and self.shift != "none"
        return self.probes == "divergence" or clipped or self.at_check == "fresh"

    def repair(self, run: Run) -> None:
        """Choose probes, recompute them through all layers, and shift the rest of their units."""
        from kvexp.methods.reuse.corrections import repair

        repair(self, run)
