"""Lookup of a prefix's attention state, merged with that of local attention."""

from __future__ import annotations

from torch import Tensor

from kvexp_kernels.backend import fused
from kvexp_kernels.lookup_merge import reference
from kvexp_kernels.lookup_merge.reference import Entries

__all__ = ["Entries", "lookup_merge"]


def lookup_merge(
    x: Tensor, entries: Entries, local_a: Tensor, local_s: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Look up the state of each query and merge it with its local one; see the reference."""
    if fused(x, *entries.tensors(), local_a, local_s):
        from kvexp_kernels.lookup_merge import triton

        return triton.lookup_merge(x, entries, local_a, local_s)
    return reference.lookup_merge(x, entries, local_a, local_s)
