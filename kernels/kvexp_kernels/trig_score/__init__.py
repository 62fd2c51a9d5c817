"""The trigonometric score of cached keys, which says what logit each can expect."""

from __future__ import annotations

from torch import Tensor

from kvexp_kernels.backend import fused
from kvexp_kernels.trig_score import reference
from kvexp_kernels.trig_score.reference import Spread

__all__ = ["Spread", "trig_score"]


def trig_score(keys: Tensor, vectors: Tensor, spread: Spread | None = None) -> Tensor:
    """Return scores `[B, Hq, S]` of cached keys `[B, H, S, D]`; see the reference."""
    if fused(keys):
        from kvexp_kernels.trig_score import triton

        return triton.trig_score(keys, vectors, spread)
    return reference.trig_score(keys, vectors, spread)
