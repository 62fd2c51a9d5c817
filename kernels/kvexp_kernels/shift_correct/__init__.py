"""A shared shift of each unit's rows, put onto them while they are moved."""

from __future__ import annotations

from torch import Tensor

from kvexp_kernels.backend import fused
from kvexp_kernels.rerotate.reference import Turn
from kvexp_kernels.shift_correct import reference
from kvexp_kernels.shift_correct.reference import Shift

__all__ = ["Shift", "Turn", "shift_correct"]


def shift_correct(x: Tensor, shift: Shift, move: Turn | None = None, out: Tensor | None = None) -> Tensor:
    """Return rows `x [B, H, C, D]`, moved if asked, plus their unit's shift; see the reference."""
    angles = () if move is None else (move.cos, move.sin)
    if fused(x, *shift.tensors(), *angles, out):
        from kvexp_kernels.shift_correct import triton

        return triton.shift_correct(x, shift, move, out)
    return reference.shift_correct(x, shift, move, out)
