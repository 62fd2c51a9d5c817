"""Rotation on a GPU: each number is read once and written once, in place if asked.

It is shift correction without a shift, and shares its kernel.
"""

from __future__ import annotations

from torch import Tensor

from kvexp_kernels.rerotate.reference import Turn
from kvexp_kernels.shift_correct.triton import correct


def rerotate(x: Tensor, turn: Turn, out: Tensor | None = None) -> Tensor:
    """Return rows `x [B, H, T, D]` turned, as the reference does."""
    return correct(x, turn, None, out)
