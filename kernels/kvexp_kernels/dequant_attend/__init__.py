"""Attention over quantised rows."""

from __future__ import annotations

from kvexp_kernels.dequant_attend.reference import dequant_attend

__all__ = ["dequant_attend"]
