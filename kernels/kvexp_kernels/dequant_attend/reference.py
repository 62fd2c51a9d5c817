"""Attention over quantised keys and values in plain torch: a block of rows is unpacked, attended, forgotten.

A fused kernel has this interface: it reads codes, scales and minima, holds no row in full, and returns the
attention state, which merges with that of rows that are not quantised.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvexp_kernels.merge_states.reference import merge_states
from kvexp_kernels.quantise.reference import Packed

BLOCK = 1024  # rows that are unpacked at a time

Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def dequant_attend(
    query: Tensor,
    keys: Packed,
    values: Packed,
    scale: float,
    visible: Tensor | None = None,
    expand: Expand | None = None,
    block: int = BLOCK,
) -> tuple[Tensor, Tensor]:
    """Attend to all rows that both `keys` and `values` hold; every query sees all of them.

    `query [B, Hq, T, D]`; keys and values of [B or 1, H] heads and S rows, H a divisor of Hq. `keys` may hold
    more rows, whose values are not packed yet: they are left out. `visible [B or 1, H, S]` bool says which
    rows a head sees. `expand` makes per-head keys and values of what is stored (multi-head latent attention).

    Returns `a [B, Hq, T, Dv]` in the query's dtype and `s [B, Hq, T]`, the natural log-sum-exp, in float32
    (float64 for float64 queries). Rows are rounded to the query's dtype when they are unpacked, as if they
    stood in an ordinary cache; the rest is float32. A query that sees no row has a = 0, s = -inf.
    """
    batch, heads, length, width = query.shape
    shared = batch > 1 and keys.codes.shape[0] == 1
    if shared:  # one long block of queries, so that rows are unpacked once for the whole batch
        query = query.transpose(0, 1).reshape(1, heads, batch * length, width)
    state: tuple[Tensor, Tensor] | None = None
    for start in range(0, max(1, values.rows), block):
        stop = min(start + block, values.rows)
        key, value = (x.dequantise(query.dtype, start, stop) for x in (keys, values))
        if expand is not None:
            key, value = expand(key, value)
        seen = None if visible is None else visible[..., start:stop]
        part = _attended(query, key, value, scale, seen)
        state = part if state is None else merge_states(*state, *part)
    assert state is not None
    a, s = state
    if shared:
        a = a.view(heads, batch, length, -1).transpose(0, 1)
        s = s.view(heads, batch, length).transpose(0, 1)
    return a.to(query.dtype), s


def _attended(
    query: Tensor, key: Tensor, value: Tensor, scale: float, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the state over rows in full, in the working dtype."""
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, heads, length, width = query.shape
    stored = key.shape[1]
    grouped = query.to(work).reshape(batch, stored, heads // stored * length, width)
    scores = grouped @ key.to(work).mT * scale  # [B, H, G*T, S]
    if seen is not None:
        scores = scores.masked_fill(~seen[:, :, None], -torch.inf)
    s = scores.logsumexp(-1)
    weights = (scores - s.masked_fill(torch.isneginf(s), 0.0)[..., None]).exp()
    a = weights @ value.to(work)
    return a.view(batch, heads, length, -1), s.view(batch, heads, length)
