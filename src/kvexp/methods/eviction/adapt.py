"""Let centres follow the queries of one sequence: an exponential moving average of their moments."""

from __future__ import annotations

import torch

from kvexp.attention.bands import Bands
from kvexp.stats.moments import NAMES, Moments, features


def adapted(
    moments: Moments,
    queries: torch.Tensor,
    positions: torch.Tensor,
    real: torch.Tensor,
    bands: Bands,
    rate: float,
) -> Moments:
    """Return moments [B, Hq, F] moved towards `queries`, one step of size `rate` for each real query.

    m <- (1 - rate) m + rate x(q), from the first query to the last, in one go.

    Args:
        moments: [Hq, F], or [B, Hq, F] as returned before.
        queries: [B, Hq, T, D] as the model rotated them; the rotation is undone here.
        positions: [B or 1, T] of the queries.
        real: [B, T] bool, which queries are no pads.
        bands: of this layer.
        rate: between 0 and 1.
    """
    turning, still = bands.turned_back(queries, positions[:, None])
    later = real.flip(1).cumsum(1).flip(1) - real.long()  # real queries behind each one
    weights = (rate * (1 - rate) ** later * real).to(queries.device)[:, None, :, None]  # [B, 1, T, 1]
    left = ((1 - rate) ** real.sum(1)).to(queries.device)[:, None, None]
    moved = features(turning, still)
    return Moments(*(_step(getattr(moments, name), getattr(moved, name), weights, left) for name in NAMES))


def packed(moments: Moments) -> torch.Tensor:
    """Return moments [B, Hq, F] as one real tensor [B, Hq, 4 F + 3 N]."""
    found = moments.tensors()
    return torch.cat([found.pop("mean").flatten(-2), *found.values()], dim=-1)


def unpacked(values: torch.Tensor, bands: Bands) -> Moments:
    """Return what `packed` packed."""
    turning, count = bands.count, values.shape[-1]
    still = (count - 4 * turning) // 3
    sizes = [2 * turning, turning, turning, still, still, still]
    parts = dict(zip(NAMES, values.split(sizes, dim=-1), strict=True))
    return Moments.of({**parts, "mean": parts["mean"].unflatten(-1, (turning, 2))})


def _step(old: torch.Tensor, new: torch.Tensor, weights: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    return old * left.to(old.device) + (new * weights).sum(2).to(old.device, old.dtype)
