"""Attention over stored rows that also returns its log-sum-exp, so that partial results can be merged.

`lse [B, Hq, T]` is the natural-log sum-exp of the scaled scores, float32 (float64 for float64 inputs).
A query that sees no row has output 0 and lse -inf. Backends: `reference` (plain torch, float32 inside),
`flash` (torch's fused CPU kernel), `flex` (torch's flex attention, compiled on a GPU).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from kvexp.errors import UserError

BACKENDS = ("auto", "reference", "flash", "flex")


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    visible: torch.Tensor | None = None,
    causal: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (output [B, Hq, T, Dv], lse [B, Hq, T]) of softmax attention.

    query [B, Hq, T, D], key [B, Hkv, S, D], value [B, Hkv, S, Dv] with Hkv a divisor of Hq;
    `visible` bool, broadcastable to [B, Hq, T, S], or [B or 1, Hkv, T, S] where the query heads of a KV head
    see the same, which takes less memory; `causal` (T = S) stands for a lower triangle.
    """
    if _by_kv_head(query, visible):
        return _each_member(
            query, visible, lambda q, seen: attend(q, key, value, scale, seen, False, backend)
        )
    batch, heads, length, _ = query.shape
    if visible is None and _one_of_group(query, key):
        output, lse = attend(_folded(query, key), key, value, scale, backend=backend)
        return output.reshape(batch, heads, 1, -1), lse.reshape(batch, heads, 1)
    if key.shape[-2] == 0:
        empty = query.new_zeros(batch, heads, length, value.shape[-1])
        return empty, torch.full_like(empty[..., 0], -torch.inf, dtype=_stat_dtype(query))
    if backend == "auto":
        backend = _fastest(query)
    function = {"reference": _reference, "flash": _flash_cpu, "flex": _flex}[backend]
    output, lse = function(query, key, value, scale, visible, causal)
    if visible is not None:
        blind = ~visible.any(-1)  # the fused kernels give such rows lse 0 and an arbitrary mean
        output = output.masked_fill(blind[..., None], 0.0)
        lse = lse.masked_fill(blind, -torch.inf)
    return output, lse


def attend_without_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    visible: torch.Tensor | None,
    causal: bool,
) -> torch.Tensor:
    """Return torch's own attention [B, Hq, T, Dv]: the fast path of layers that merge nothing.

    Arguments are those of `attend`.
    """
    if _by_kv_head(query, visible):
        return _each_member(
            query, visible, lambda q, seen: (attend_without_lse(q, key, value, scale, seen, False),)
        )[0]
    grouped = query.shape[1] != key.shape[1]
    if visible is None and _one_of_group(query, key):
        output = F.scaled_dot_product_attention(_folded(query, key), key, value, scale=scale)
        return output.reshape(query.shape[0], query.shape[1], 1, -1)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def _one_of_group(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether several heads with one query each read the same keys."""
    return query.shape[2] == 1 and query.shape[1] != key.shape[1]


def _folded(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the heads that read a KV head as its queries [B, Hkv, G, D]: its rows are then read once."""
    return query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])


def _by_kv_head(query: torch.Tensor, visible: torch.Tensor | None) -> bool:
    return visible is not None and visible.dim() == 4 and visible.shape[1] not in (1, query.shape[1])


def _each_member(query, visible, attend):
    """Attend for one query head of each KV head at a time, so that a mask is not repeated for all of them.

    For a single query the mask is small, and repeated.
    """
    group = query.shape[1] // visible.shape[1]
    if query.shape[2] == 1:
        return attend(query, visible.repeat_interleave(group, dim=1))
    parts = zip(*(attend(query[:, member::group], visible) for member in range(group)), strict=True)
    return tuple(torch.stack(part, dim=2).flatten(1, 2) for part in parts)


def _fastest(query: torch.Tensor) -> str:
    if query.device.type == "cpu":
        return "flash"
    compiled = query.device.type == "cuda" and query.dtype != torch.float64
    return "flex" if compiled else "reference"


def _stat_dtype(query: torch.Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _reference(query, key, value, scale, visible, causal):
    dtype, groups = _stat_dtype(query), query.shape[1] // key.shape[1]
    key, value = (x.to(dtype).repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query.to(dtype) @ key.transpose(-1, -2) * scale  # [B, Hq, T, S]
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ value).to(query.dtype), scores.logsumexp(-1)


def _flash_cpu(query, key, value, scale, visible, causal):
    if query.device.type != "cpu":
        raise UserError(f"the flash backend runs on a CPU, not on {query.device}: use model.attention=auto")
    width = value.shape[-1]
    if width < key.shape[-1]:  # MLA: values are narrower than keys, the kernel wants them equal
        value = F.pad(value, (0, key.shape[-1] - width))
    elif width > key.shape[-1]:
        query, key = (F.pad(x, (0, width - x.shape[-1])) for x in (query, key))
    mask = None
    if visible is not None:  # the kernel takes an additive mask of four axes, or of two
        mask = torch.zeros(visible.shape, dtype=query.dtype).masked_fill(~visible, -torch.inf)
        mask = mask[(None,) * (4 - mask.dim())]
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )
    return output[..., :width], lse


def _flex(query, key, value, scale, visible, causal):
    from torch.nn.attention.flex_attention import AuxRequest

    if causal:
        visible = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    modify = None
    if visible is not None:
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        dense = visible.expand(shape)

        def modify(score, b, h, t, s):
            return torch.where(dense[b, h, t, s], score, -torch.inf)

    output, aux = _flex_attention(query.is_cuda)(
        query,
        key,
        value,
        score_mod=modify,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return output, aux.lse


@cache
def _flex_attention(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention
