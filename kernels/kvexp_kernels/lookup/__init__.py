"""Lookup of the memory entry whose key is nearest to a query by cosine."""

from __future__ import annotations

from kvexp_kernels.lookup.reference import lookup_flat, quantise_keys
from kvexp_kernels.lookup.two_level import TwoLevelIndex

__all__ = ["TwoLevelIndex", "lookup_flat", "quantise_keys"]
