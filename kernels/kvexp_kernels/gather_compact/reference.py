"""Drop rows of a cache and close the gaps, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def gather_compact(tensors: Sequence[Tensor], keep: Tensor) -> list[Tensor]:
    """Move the rows that stay to the front of each tensor, in place; their order stays.

    tensors: `[B, H, S]` or `[B, H, S, D]` each, of one S; `keep [B, H, n]` int64: the rows that stay,
    strictly ascending for each head (so that no row moves back). Returns views of the first n rows of each
    tensor; what stands behind them is undefined.
    """
    count = keep.shape[-1]
    kept = []
    for x in tensors:
        index = keep if x.dim() == 3 else keep[..., None].expand(*keep.shape, x.shape[-1])
        x[:, :, :count] = x.gather(2, index)
        kept.append(x[:, :, :count])
    return kept
