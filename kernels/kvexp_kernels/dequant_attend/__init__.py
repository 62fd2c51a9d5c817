"""Attention over quantised rows."""

from __future__ import annotations

from torch import Tensor

from kvexp_kernels.backend import fused, rows_of_a_tile
from kvexp_kernels.dequant_attend import reference
from kvexp_kernels.dequant_attend.reference import BLOCK, Expand
from kvexp_kernels.quantise.reference import Packed

__all__ = ["dequant_attend"]


def dequant_attend(
    query: Tensor,
    keys: Packed,
    values: Packed,
    scale: float,
    visible: Tensor | None = None,
    expand: Expand | None = None,
    block: int = BLOCK,
) -> tuple[Tensor, Tensor]:
    """Attend to all rows that both `keys` and `values` hold; see the reference.

    Rows that have to be expanded, or are too wide for the kernel, go through plain torch, `block` at a time.
    """
    fits = expand is None and rows_of_a_tile(max(keys.width, values.width), query.dtype) > 0
    if fits and fused(query, keys.codes, values.codes, visible):
        from kvexp_kernels.dequant_attend import triton

        return triton.dequant_attend(query, keys, values, scale, visible)
    return reference.dequant_attend(query, keys, values, scale, visible, expand, block)
