"""Compaction of cache rows in place, in the order of their positions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvexp_kernels.backend import fused
from kvexp_kernels.gather_compact import reference

__all__ = ["gather_compact"]


def gather_compact(tensors: Sequence[Tensor], keep: Tensor) -> list[Tensor]:
    """Move the rows that stay to the front of each tensor, in place; see the reference."""
    if fused(*tensors, keep):
        from kvexp_kernels.gather_compact import triton

        return triton.gather_compact(tensors, keep)
    return reference.gather_compact(tensors, keep)
