"""Lookup of the memory entry whose key is nearest to a query by cosine."""

from __future__ import annotations

from torch import Tensor

from kvexp_kernels.backend import fused
from kvexp_kernels.lookup import cells, reference
from kvexp_kernels.lookup.cell_lists import CellLists
from kvexp_kernels.lookup.cells import Cells
from kvexp_kernels.lookup.joint_lists import JointLists
from kvexp_kernels.lookup.lists import InvertedLists
from kvexp_kernels.lookup.reference import quantise_keys
from kvexp_kernels.lookup.two_level import TwoLevelIndex

__all__ = [
    "CellLists",
    "Cells",
    "InvertedLists",
    "JointLists",
    "TwoLevelIndex",
    "lookup_flat",
    "lookup_two_level",
    "quantise_keys",
]


def lookup_flat(x: Tensor, keys: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Find the best key of each query, in each of C codebooks; see the reference."""
    if fused(x, keys, scale):
        from kvexp_kernels.lookup import triton

        return triton.lookup_flat(x, keys, scale)
    return reference.lookup_flat(x, keys, scale)


def lookup_two_level(x: Tensor, index: Cells, probe: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Find the best key among those of the `probe` best cells, in each of C codebooks; see `cells`."""
    if fused(x, *index.tensors()):
        from kvexp_kernels.lookup import triton_cells

        return triton_cells.lookup_two_level(x, index, probe)
    return cells.lookup_two_level(x, index, probe)
