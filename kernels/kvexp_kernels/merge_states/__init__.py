"""Merging of attention states: partial attention outputs with their log-sum-exp."""

from __future__ import annotations

from torch import Tensor

from kvexp_kernels.backend import fused
from kvexp_kernels.merge_states import reference

__all__ = ["merge_many", "merge_states"]


def merge_states(a1: Tensor, s1: Tensor, a2: Tensor, s2: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two attention states of the same queries over disjoint sets of keys; see the reference."""
    if fused(a1, s1, a2, s2):
        from kvexp_kernels.merge_states import triton

        return triton.merge_states(a1, s1, a2, s2)
    return reference.merge_states(a1, s1, a2, s2)


def merge_many(a: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge N attention states of the same queries along the leading axis; see the reference."""
    if fused(a, s):
        from kvexp_kernels.merge_states import triton

        return triton.merge_many(a, s)
    return reference.merge_many(a, s)
