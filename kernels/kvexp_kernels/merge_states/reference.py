"""Merge attention states of disjoint sets of keys, in plain torch.

The attention state of a query over a set of keys is the pair (a, s): the softmax-weighted mean `a` of
the values, and the natural log-sum-exp `s` of the scores. Two states of one query over disjoint sets
merge into the state over their union, exactly and associatively: so Attention-State Memory composes
prefix and local attention, and flash attention joins its blocks. Everything is done on `s`, never on its
exponential: scores of 60 to 100 are common and would overflow.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_states(a1: Tensor, s1: Tensor, a2: Tensor, s2: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two attention states of the same queries over disjoint sets of keys.

    `a1`, `a2`: `[..., Dv]` outputs; `s1`, `s2`: `[...]` log-sum-exp, natural log. Shapes broadcast.

        s = logaddexp(s1, s2),    a = a2 + sigmoid(s1 - s2) (a1 - a2)

    Returns `a` in the wider dtype of `a1` and `a2`, and `s` in float32; the work is done in float32, or in
    float64 (and `s` is float64) when any input is. A side with `s = -inf` saw no key: it adds nothing,
    whatever its output holds. Where both sides are empty the result is `a = 0`, `s = -inf`.
    """
    out = torch.promote_types(a1.dtype, a2.dtype)
    work = _working_dtype(a1, s1, a2, s2)
    s1, s2 = s1.to(work), s2.to(work)
    a1, a2 = _empty_to_zero(a1.to(work), s1), _empty_to_zero(a2.to(work), s2)
    # -inf minus -inf is NaN; both outputs are zero there, so any finite weight will do.
    gap = torch.where(torch.isneginf(s1), s1, s1 - s2)
    return (a2 + torch.sigmoid(gap).unsqueeze(-1) * (a1 - a2)).to(out), torch.logaddexp(s1, s2)


def merge_many(a: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge N attention states of the same queries along the leading axis.

    `a`: `[N, ..., Dv]`; `s`: `[N, ...]`. Returns `([..., Dv], [...])`, with the dtypes and the treatment of
    empty states of `merge_states`; equal to folding `merge_states` over the axis up to rounding.
    """
    work = _working_dtype(a, s)
    s = s.to(work)
    total = torch.logsumexp(s, dim=0)
    # Where all states are empty, -inf minus -inf would be NaN; minus zero leaves weights exp(-inf) = 0.
    weight = torch.exp(s - total.masked_fill(torch.isneginf(total), 0.0))
    merged = (weight.unsqueeze(-1) * _empty_to_zero(a.to(work), s)).sum(dim=0)
    return merged.to(a.dtype), total


def _working_dtype(*tensors: Tensor) -> torch.dtype:
    """Float64 when any tensor is float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _empty_to_zero(a: Tensor, s: Tensor) -> Tensor:
    """Zero the outputs of states without keys: a kernel may leave NaN there."""
    return a.masked_fill(torch.isneginf(s).unsqueeze(-1), 0.0)
