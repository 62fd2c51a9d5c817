"""Attention over rows of heads that hold different numbers of them."""

from __future__ import annotations

from torch import Tensor

from kvexp_kernels.backend import fused, rows_of_a_tile
from kvexp_kernels.ragged_attend import reference

__all__ = ["ragged_attend"]


def ragged_attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    longest: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend head by head; see the reference.

    `longest`: a bound on `lengths`, known without asking the device; default: all rows.
    """
    fits = rows_of_a_tile(max(query.shape[-1], values.shape[-1]), query.dtype) > 0
    if fits and fused(query, keys, values, starts, lengths):
        from kvexp_kernels.ragged_attend import triton

        return triton.ragged_attend(query, keys, values, starts, lengths, scale, longest)
    return reference.ragged_attend(query, keys, values, starts, lengths, scale)
