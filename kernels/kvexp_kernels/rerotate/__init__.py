"""Rotation of cached keys to other positions."""

from __future__ import annotations

from torch import Tensor

from kvexp_kernels.backend import fused
from kvexp_kernels.rerotate import reference
from kvexp_kernels.rerotate.reference import Turn

__all__ = ["Turn", "rerotate"]


def rerotate(x: Tensor, turn: Turn, out: Tensor | None = None) -> Tensor:
    """Return rows `x [B, H, T, D]` turned; see the reference."""
    if fused(x, turn.cos, turn.sin, out):
        from kvexp_kernels.rerotate import triton

        return triton.rerotate(x, turn, out)
    return reference.rerotate(x, turn, out)
