"""Attention over rows that lie end to end, heads of different lengths, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def ragged_attend(
    query: Tensor, keys: Tensor, values: Tensor, starts: Tensor, lengths: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend head by head: every query sees all rows of its head.

    `query [B, Hq, T, D]`; `keys [N, D]` and `values [N, Dv]` hold the rows of all heads; those of KV head h
    of sequence b are `lengths[b, h]` of them from row `starts[b, h]` on. `starts`, `lengths [b, H]` int64,
    b = B or 1 (rows that serve the whole batch), H a divisor of Hq. Spans need not touch, so that the buffers
    of a rectangular cache, with room behind the rows of each head, are read as they are.

    Returns `a [B, Hq, T, Dv]` in the query's dtype and `s [B, Hq, T]`, the natural log-sum-exp, in float32
    (float64 for float64 queries); computed in that. A head without rows has a = 0, s = -inf.
    """
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    stored, heads = starts.shape
    folded = fold(query, stored, heads)
    a = query.new_zeros(*folded.shape[:2], values.shape[-1], dtype=work)
    s = query.new_full(folded.shape[:2], -torch.inf, dtype=work)
    spans = zip(starts.flatten().tolist(), lengths.flatten().tolist(), strict=True)
    for head, (start, length) in enumerate(spans):
        if length:
            key, value = (x[start : start + length].to(work) for x in (keys, values))
            scores = folded[head].to(work) @ key.T * scale
            s[head] = scores.logsumexp(-1)
            a[head] = scores.softmax(-1) @ value
    return unfold(a.to(query.dtype), query, stored), unfold(s, query, stored)


def fold(query: Tensor, stored: int, heads: int) -> Tensor:
    """[B, Hq, T, D] -> [stored * heads, M, D]: the M queries that read the rows of one KV head."""
    batch, q_heads, length, width = query.shape
    if stored == 1 and batch > 1:
        query = query.transpose(0, 1)
    return query.reshape(stored * heads, batch // stored * (q_heads // heads) * length, width)


def unfold(x: Tensor, query: Tensor, stored: int) -> Tensor:
    """[stored * heads, M, ...] -> [B, Hq, T, ...], the inverse of `fold`."""
    batch, q_heads, length, _ = query.shape
    if stored == 1 and batch > 1:
        return x.reshape(q_heads, batch, length, *x.shape[2:]).transpose(0, 1)
    return x.reshape(batch, q_heads, length, *x.shape[2:])
