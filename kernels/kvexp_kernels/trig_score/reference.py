"""TriAttention's score of cached keys in plain torch: a dot product, and what the spread of queries adds.

Source: "TriAttention" (2026, arXiv 2604.04921). Its mean over offsets is one dot product of a cached key with
a vector for each query head (the caller makes it); the second part weighs the size of each rotary band.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spread:
    """What is added for the spread of queries around their mean.

    weights `[B or 1, Hq, F + N]`: of the size |c_f| of each of F bands, and of |c_j| of each of the N numbers
    that do not rotate. Bands lie in a key as `kvexp_kernels.rerotate` says. With `squares`, weights
    `[B or 1, Hq, D]` are those of the squares of all numbers, in the order of the key.
    """

    weights: Tensor
    bands: int
    adjacent: bool = False
    last: bool = False
    squares: bool = False


def trig_score(keys: Tensor, vectors: Tensor, spread: Spread | None = None) -> Tensor:
    """Return scores `[B, Hq, S]` of cached keys `[B, H, S, D]` by `vectors [B or 1, Hq, D]`.

    H is a divisor of Hq. In float32, or float64 for float64 keys.
    """
    work = torch.float64 if keys.dtype == torch.float64 else torch.float32
    keys = keys.to(work)
    score = _against(keys, vectors)
    return score if spread is None else score.add_(spread_score(keys, spread))


def spread_score(keys: Tensor, spread: Spread) -> Tensor:
    """Return what `spread` adds to the scores of keys `[B, H, S, D]`, `[B, Hq, S]` in the keys' dtype."""
    if spread.squares:
        return _against(keys.square(), spread.weights)
    width = 2 * spread.bands
    at = keys.shape[-1] - width if spread.last else 0
    turning = keys[..., at : at + width]
    if spread.adjacent:
        one, other = turning[..., ::2], turning[..., 1::2]
    else:
        one, other = turning.split(spread.bands, dim=-1) if width else (turning, turning)
    sizes = (one * one).addcmul_(other, other).sqrt_()
    still = keys[..., :at] if spread.last else keys[..., width:]
    if still.shape[-1]:
        sizes = torch.cat([sizes, still.abs()], dim=-1)
    return _against(sizes, spread.weights)


def _against(keys: Tensor, vectors: Tensor) -> Tensor:
    """Dot products [B, Hq, S] of keys [B, H, S, D] with a vector [B or 1, Hq, D] a query head."""
    by_key = vectors.to(keys.device, keys.dtype).unflatten(1, (keys.shape[1], -1))
    return (by_key @ keys.mT).flatten(1, 2)
