"""Attention-aware aggregation: one attention state per centroid and head, from a stream of samples.

A sample is a query's attention state over the prefix: its output `a [Dv]` and its log-sum-exp `s`. A memory
entry replaces the samples of one cluster C by one state. Attention-State Memory (equation 5) weights by mass:

    Z_bar = mean_i exp(s_i),    a_bar = sum_i exp(s_i) a_i / sum_i exp(s_i)

in log space here: with m the largest s seen, u = sum exp(s - m) and A = sum exp(s - m) a,
log Z_bar = m + log u - log n and a_bar = A / u; a new maximum rescales u and A by exp(m_old - m_new).
By Jensen log Z_bar >= mean s, so one sample of large mass may own an entry. `rule="mean"`, which is not the
paper's, takes the plain means of a and of s instead (s: the geometric mean of Z).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

RULES = ("eq5", "mean")
HELD = ("count", "seen", "mean_s", "m2", "top", "mass", "out")


class States(NamedTuple):
    """Aggregated states of k centroids."""

    a: Tensor  # [k, h, dv]; 0 where a head saw no mass
    log_z: Tensor  # [k, h], natural log; -inf where a head saw no mass
    counts: Tensor  # [k] int64, samples assigned
    std_s: Tensor  # [k, h], standard deviation of s within the cluster (divisor n), nats


class StateAccumulator:
    """Aggregates samples into one state per centroid and head, block by block.

    Holds O(k h dv) numbers however many samples come; the result does not depend on block size or order,
    up to rounding. A sample with `s = -inf` has no mass: `eq5` counts it as Z = 0, `mean` and the standard
    deviation leave it out. `extras` names further fields, with their shape for one sample, whose plain means
    are kept.
    """

    def __init__(
        self,
        k: int,
        heads: int,
        dv: int,
        dtype: torch.dtype = torch.float32,
        rule: str = "eq5",
        extras: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Start empty; `dtype` is float32, or float64 for oracles."""
        if rule not in RULES:
            raise ValueError(f"rule is {rule!r}, not one of {', '.join(RULES)}")
        self.rule, self.dtype = rule, dtype
        self._count = torch.zeros(k, dtype=torch.int64)
        self._seen = torch.zeros(k, heads, dtype=dtype)  # samples with mass
        self._mean_s, self._m2 = torch.zeros(k, heads, dtype=dtype), torch.zeros(k, heads, dtype=dtype)
        self._top = torch.full((k, heads), -torch.inf, dtype=dtype)  # m above
        self._mass = torch.zeros(k, heads, dtype=dtype)  # u above
        self._out = torch.zeros(k, heads, dv, dtype=dtype)  # A above, or the running mean of a
        self._extras = {name: torch.zeros(k, *shape, dtype=dtype) for name, shape in (extras or {}).items()}

    def add(self, index: Tensor, s: Tensor, a: Tensor, **extras: Tensor) -> None:
        """Take n samples: `index [n]` centroid numbers, `s [n, h]`, `a [n, h, dv]`, extras `[n, ...]`."""
        if extras.keys() != self._extras.keys():
            raise ValueError(f"extra fields {sorted(extras)} do not match {sorted(self._extras)}")
        if torch.isnan(s).any() or torch.isposinf(s).any():
            raise ValueError("log-sum-exp of a sample is NaN or +inf")
        s, live = s.to(self.dtype), ~torch.isneginf(s)
        a = a.to(self.dtype).masked_fill(~live.unsqueeze(-1), 0.0)
        self._count.index_add_(0, index, torch.ones_like(index))
        self._seen.index_add_(0, index, live.to(self.dtype))
        self._add_spread(index, s, live)
        if self.rule == "eq5":
            self._add_mass(index, s, a)
        else:
            gap = (a - self._out[index]).masked_fill(~live.unsqueeze(-1), 0.0)
            self._out += _sum_by(index, gap, self._out) / self._seen.clamp(min=1).unsqueeze(-1)
        for name, value in extras.items():
            mean = self._extras[name]
            step = _sum_by(index, value.to(self.dtype) - mean[index], mean)
            mean += step / _like(self._count.clamp(min=1), step)

    def _add_spread(self, index: Tensor, s: Tensor, live: Tensor) -> None:
        """Update mean and sum of squared deviations of s (Welford's recurrence, a block at a time)."""
        gap = torch.where(live, s - self._mean_s[index], 0.0)
        total = _sum_by(index, gap, self._mean_s)
        step = total / self._seen.clamp(min=1)
        self._m2 += (_sum_by(index, gap * gap, self._m2) - step * total).clamp(min=0)
        self._mean_s += step

    def _add_mass(self, index: Tensor, s: Tensor, a: Tensor) -> None:
        top = self._top.scatter_reduce(0, index.unsqueeze(-1).expand_as(s), s, "amax")
        self._rescale(top)
        weight = torch.exp(s - _finite(top)[index])
        self._mass.index_add_(0, index, weight)
        self._out.index_add_(0, index, weight.unsqueeze(-1) * a)

    def _rescale(self, top: Tensor) -> None:
        """Express u and A relative to the new maximum `top [k, h]`."""
        scale = torch.exp(self._top - _finite(top))
        self._mass *= scale
        self._out *= scale.unsqueeze(-1)
        self._top = top

    def merge(self, other: StateAccumulator) -> None:
        """Take in the samples of another accumulator of the same shape and rule (another shard's)."""
        if self.rule != other.rule or self._out.shape != other._out.shape:
            raise ValueError("accumulators of different rule or shape cannot be merged")
        seen, count = self._seen + other._seen, self._count + other._count
        share = other._seen / seen.clamp(min=1)
        gap = other._mean_s - self._mean_s
        self._m2 += other._m2 + gap * gap * self._seen * share
        self._mean_s += gap * share
        if self.rule == "eq5":
            top = torch.maximum(self._top, other._top)
            self._rescale(top)
            scale = torch.exp(other._top - _finite(top))
            self._mass += scale * other._mass
            self._out += scale.unsqueeze(-1) * other._out
        else:
            self._out += share.unsqueeze(-1) * (other._out - self._out)
        part = other._count.to(self.dtype) / count.clamp(min=1)
        for name, mean in self._extras.items():
            mean += _like(part, mean) * (other._extras[name] - mean)
        self._seen, self._count = seen, count

    def state(self) -> dict[str, Tensor]:
        """Return all that it holds."""
        held = {name: getattr(self, f"_{name}") for name in HELD}
        return {**held, **{f"extra.{name}": mean for name, mean in self._extras.items()}}

    def restored(self, state: Mapping[str, Tensor]) -> StateAccumulator:
        """Return another one that holds `state`."""
        extras = {name: mean.shape[1:] for name, mean in self._extras.items()}
        k, heads, dv = self._out.shape
        other = StateAccumulator(k, heads, dv, self.dtype, self.rule, extras)
        for name in HELD:
            setattr(other, f"_{name}", state[name])
        other._extras = {name: state[f"extra.{name}"] for name in extras}
        return other

    def finish(self) -> States:
        """Return the states of all k centroids; one without a sample has `counts` 0 and `log_z` -inf."""
        if self.rule == "eq5":
            a = self._out / self._mass.masked_fill(self._mass == 0, 1.0).unsqueeze(-1)
            log_z = self._top + torch.log(self._mass) - _like(self._count.clamp(min=1), self._top).log()
        else:
            a = self._out.clone()
            log_z = self._mean_s.masked_fill(self._seen == 0, -torch.inf)
        return States(a, log_z, self._count.clone(), (self._m2 / self._seen.clamp(min=1)).sqrt())

    def mean(self, name: str) -> Tensor:
        """Return the plain mean `[k, ...]` of an extra field over each centroid's samples (0 without one)."""
        return self._extras[name].clone()


def _sum_by(index: Tensor, values: Tensor, like: Tensor) -> Tensor:
    """Sum `values [n, ...]` by centroid, in the shape of `like [k, ...]`."""
    return torch.zeros_like(like).index_add_(0, index, values)


def _like(per_centroid: Tensor, tensor: Tensor) -> Tensor:
    """Shape `[k]` for arithmetic with `[k, ...]`, in the dtype of that tensor."""
    return per_centroid.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1))


def _finite(top: Tensor) -> Tensor:
    """Replace a maximum of -inf by 0, so that exp(-inf - m) is 0 and not NaN."""
    return top.masked_fill(torch.isneginf(top), 0.0)
