"""TriAttention: queries gather around a mean before RoPE, so a cosine of the distance foretells attention."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvexp.errors import UserError
from kvexp.methods.base import Calibration
from kvexp.methods.eviction.base import EvictionMethod

if TYPE_CHECKING:
    from torch import Tensor

    from kvexp.budget import Budget
    from kvexp.methods.eviction.query_statistics import QueryStatistics
    from kvexp.methods.eviction.view import View

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TriAttention(EvictionMethod):
    """Keep the rows whose keys suit the mean queries that were measured on any text, at distances to come.

    Source: Mao et al., "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression" (2026,
    arXiv 2604.04921). With m_f the mean and r_f the mean size of a query head's pre-RoPE queries in band f,
    w_f the model's frequencies, s its attention scaling, p the position of key k, t that of the next token:

        S_trig(k, d) = sum_f s^2 |m_f| |k_f| cos(w_f (t - p + d) + arg m_f - arg k_f)
        S_norm(k)    = sum_f s^2 (r_f - |m_f|) |k_f|
        S(k)         = mean of S_trig(k, d) over the offsets d, + S_norm(k)

    S becomes a z-score over the rows that may leave, per query head. Defaults are those of the paper's code:
    rows leave at budget + 128 rows, the prompt stays, offsets are 1, 2, 4, ..., 65536.

    `mode`: who chooses together. `per_layer_perhead` (the paper's text): each KV head of each layer, by the
        maximum over its query heads. `per_head` (the code's default): the mean of that over layers; head h of
        every layer keeps the same tokens. `union`: one set for everything, by the maximum over all heads and
        layers. (The code ranks the union of all heads' best by this maximum. What is best by the maximum is
        among the best of the head where it is attained, so that taking the union first changes nothing.)
    `group`: `max` or `mean` over the query heads of a KV head.
    `trig`: S_trig. `norm`: S_norm as above (`weighted`), by r_f alone (`unweighted`), `none`, or in its place
        half the `variance` of the logit: S is then the log of the expected attention weight of Gaussian
        queries (ours).
    `offsets`, `max_offset`: powers of two, or as many equal steps (an ablation).
    `aggregate`: `mean`, or `max` of S_trig over offsets.
    `gain`: the mean over offsets is a gain for each band. `smooth` makes each offset an exponential waiting
        time, which leaves no spikes at high frequencies (ours).
    `form`: `dot` takes S_trig from cached keys in one product per query head, `cosines` undoes RoPE and adds
        cosines; they agree, and `max` needs the latter.
    `value_norm`: add the log of the value's norm (over the scale of the logits), since attention times value
        is what a row contributes (ours).
    `mix`: let the z-score of attention per query that could see the row, of the last `window` queries (as in
        SnapKV) or of all since it came (`accumulated`, as in H2O), decide too, by `mix_by`: the maximum or
        the mean of both (ours).
    `ema`: let m_f, r_f and E|q_f|^2 follow the queries of each sequence while decoding, each by this share
        (ours; 0: never).
    `budgets`: layers get rows in proportion to 1 - sum |m_f| / sum r_f (`concentration`), or to 1 - r, with r
        the correlation of S_trig with the true logits of text that the means have not seen, mean over queries
        and heads (`reconstruction`; calibration measures it where a knob asks). Half the budget at least; the
        mean over layers is the budget (ours).
    `head_budgets`: the same for the KV heads of a layer, at least what they always keep and one more row; the
        mean over heads is what the layer gets (ours).

    Departures: ties go to the lower index, not to seeded noise. A prompt that the budget cannot hold competes
    like other rows (the code keeps its first tokens); the counter `prompt_competed` says how often. Numbers
    that do not rotate count as in a dot product, and in S_norm as bands of one number.
    """

    id: ClassVar[str] = "triattention"
    paper: ClassVar[str] = "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression"
    year: ClassVar[str] = "2026"
    reads: ClassVar[tuple[str, ...]] = ("keys", "query statistics")
    unit: ClassVar[str] = "KV head of all layers"
    memory_id: ClassVar[str] = "query_statistics"
    needs_calibration: ClassVar[bool] = True
    learns_from: ClassVar[Literal["traces", "text"]] = "text"
    _weights: ClassVar[tuple[float, ...]] = ()  # of layers that share rows, once a memory is at hand

    interval: int | None = 128
    protect_prompt: bool = True
    group: Literal["mean", "max"] = "max"
    mode: Literal["per_head", "per_layer_perhead", "union"] = "per_head"
    trig: bool = True
    norm: Literal["weighted", "unweighted", "none", "variance"] = "weighted"
    offsets: Literal["geometric", "linear"] = "geometric"
    max_offset: int = 65536
    aggregate: Literal["mean", "max"] = "mean"
    gain: Literal["offsets", "smooth"] = "offsets"
    form: Literal["dot", "cosines"] = "dot"
    value_norm: bool = False
    mix: Literal["none", "window", "accumulated"] = "none"
    mix_by: Literal["max", "mean"] = "max"
    window: int = 64
    ema: float = 0.0
    budgets: Literal["uniform", "concentration", "reconstruction"] = "uniform"
    head_budgets: Literal["uniform", "concentration", "reconstruction"] = "uniform"

    def __post_init__(self) -> None:
        """Refuse knobs that make no sense, before anything loads."""
        super().__post_init__()
        for name in ("max_offset", "window"):
            if getattr(self, name) < 1:
                raise UserError(f"method.{name}={getattr(self, name)} is no number of tokens: use 1 or more")
        if not 0 <= self.ema < 1:
            raise UserError(f"method.ema={self.ema} is no share: use 0 (never) or more, below 1")
        if not self.trig and self.norm == "none" and not self.value_norm and self.mix == "none":
            raise UserError("method.trig=false method.norm=none leaves nothing to score by: drop one of them")
        if self.form == "dot" and self.aggregate == "max":
            raise UserError("method.aggregate=max needs each offset apart: add method.form=cosines")
        if self.form == "cosines" and self.gain == "smooth":
            raise UserError("method.gain=smooth has no offsets to take cosines of: use method.form=dot")
        for name, of in (("budgets", "layers"), ("head_budgets", "heads")):
            if getattr(self, name) != "uniform" and self.scope == "model":
                raise UserError(
                    f"method.{name}={getattr(self, name)} gives {of} budgets of their own, and"
                    f" method.mode={self.mode} shares rows: add method.mode=per_layer_perhead"
                )

    @property
    def scope(self) -> Literal["layer", "model"]:
        """Whether layers choose together."""
        return "layer" if self.mode == "per_layer_perhead" else "model"

    @property
    def observes(self) -> bool:  # type: ignore[override]
        """Whether the attention of every step is added up."""
        return self.mix == "accumulated"

    @property
    def follows(self) -> bool:  # type: ignore[override]
        """Whether the centres follow the queries."""
        return self.ema > 0

    @property
    def window_size(self) -> int:
        """How many of the latest queries are remembered."""
        return self.window if self.mix == "window" else 0

    def smallest_budget(self) -> int:
        """Return the fewest rows that leave one beside the sinks and the recent rows."""
        return self.sinks + self.recent + 1

    def memory_class(self) -> type[QueryStatistics]:
        """Return the class of the statistics."""
        from kvexp.methods.eviction.query_statistics import QueryStatistics

        return QueryStatistics

    @property
    def reconstructs(self) -> bool:
        """Whether calibration has to say how well means foretell logits."""
        return "reconstruction" in (self.budgets, self.head_budgets)

    @property
    def divides(self) -> bool:  # type: ignore[override]
        """Whether heads hold unlike numbers of rows."""
        return self.head_budgets != "uniform"

    def memory_facts(self, budget: Budget, seed: int) -> dict[str, Any]:
        """Return what is measured beyond means, which depend on model and text alone."""
        return {"reconstruction": True} if self.reconstructs else {}

    def prepare(self, model: Any, calibration: Calibration, budget: Budget) -> QueryStatistics:
        """Measure the queries of the calibration text."""
        from kvexp.methods.eviction.query_statistics import prepare

        return prepare(model, calibration, self.reconstructs)

    def bound(self, model: Any, memory: Any) -> TriAttention:
        """Return the method with the weights of layers; UserError for a memory that does not serve it."""
        from kvexp.methods.eviction.query_statistics import refuse_other

        refuse_other(memory, model, self.reconstructs)
        if self.budgets == "uniform":
            return self
        from kvexp.methods.eviction.tribudgets import of_layers

        bound = copy.copy(self)  # the budget of a layer is asked for without a memory
        object.__setattr__(bound, "_weights", of_layers(self, memory))
        return bound

    def layer_rows(self, layer: int, n_layers: int, rows: int, length: int) -> int:
        """Return how many rows per KV head a layer may keep of `length` tokens; their mean is `rows`."""
        if self.budgets == "uniform" or length <= rows:
            return rows
        from kvexp.methods.eviction.tribudgets import among_layers

        return among_layers(self.smallest_budget(), self._weights, rows, length)[layer]

    def allot(
        self, scores: Tensor, targets: Sequence[int], view: View, always: Tensor | None
    ) -> list[list[int]]:
        """Return how many rows each head of each sequence keeps; they sum to H times the target."""
        if not self.divides:
            return super().allot(scores, targets, view, always)
        from kvexp.methods.eviction.tribudgets import among_heads

        return among_heads(self, scores, targets, view, always)

    def observe(self, view: View) -> None:
        """Add up the attention of this forward, or let the centres follow its queries."""
        from kvexp.methods.eviction import triscore

        triscore.observe(self, view)

    def score(self, view: View) -> Tensor:
        """Return z-scores of the rows that may leave, [B, Hq, S]; 0 for the others."""
        from kvexp.methods.eviction import triscore

        return triscore.z_score(self, view)

    def combine(self, scores: Tensor, view: View) -> Tensor:
        """Return scores of the stored heads, [B, H, S], mixed with attention if wanted."""
        from kvexp.methods.eviction import triscore

        return triscore.mixed(self, super().combine(scores, view), view)

    def across(self, scores: list[Tensor], views: list[View]) -> list[Tensor]:
        """Return one ranking for all layers: of each KV head (`per_head`), or of all heads (`union`)."""
        import torch

        together = torch.stack([one.to(scores[0].device) for one in scores])  # [L, B, H, S]
        if self.mode == "union":
            joint = together.amax((0, 2))[:, None].expand(scores[0].shape)
        else:
            joint = together.mean(0)
        return [joint.to(one.device) for one in scores]

    def evicted(self, view: View) -> None:
        """Count prompts that had to compete although they are protected."""
        evictor = view.evictor
        if not self.protect_prompt or view.index:
            return
        prompt = evictor.prompt
        held = (evictor.rows or 0) - self.recent
        crowded = 1 if prompt is None else int((prompt >= held).sum())
        if crowded and "prompt_competed" not in evictor.counters:
            log.warning(
                "the prompt is longer than the budget of %s rows: its rows compete with the others, so raise"
                " the budget, or say so with method.protect_prompt=false",
                evictor.rows,
            )
        if crowded:
            evictor.counters["prompt_competed"] = evictor.counters.get("prompt_competed", 0) + crowded
