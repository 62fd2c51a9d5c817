"""Queries as a Gaussian: their mean and covariance as they come, and the attention that such queries give.

B sequences, Hq query heads, Hk heads of keys, S rows, D numbers a head. Everything is float32, or float64 for
float64 models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvexp.attention.bands import Bands
from kvexp.methods.eviction.trig import gain

BLOCK = 1024  # rows whose quadratic forms stand in memory at once


@dataclass(frozen=True)
class Gaussian:
    """count [B], mean [B, Hq, D], scatter [B, Hq, D, D] (sum of centred outer products) of vectors seen."""

    count: torch.Tensor
    mean: torch.Tensor
    scatter: torch.Tensor

    @property
    def covariance(self) -> torch.Tensor:
        """Mean of the centred outer products, [B, Hq, D, D]; 0 where no vector was seen."""
        return self.scatter / self.count.clamp(min=1)[:, None, None, None]

    def merged(self, other: Gaussian) -> Gaussian:
        """Return the statistics of both sets of vectors (a batch of 1 stands for every sequence)."""
        total = self.count + other.count
        share = (other.count / total.clamp(min=1))[:, None, None]
        step = other.mean - self.mean
        between = step[..., :, None] * step[..., None, :] * (self.count[:, None, None] * share)[..., None]
        return Gaussian(total, self.mean + step * share, self.scatter + other.scatter + between)


def measured(vectors: torch.Tensor, counted: torch.Tensor) -> Gaussian:
    """Return the statistics of vectors [B, Hq, T, D]; `counted` [B, T] says which of them count."""
    x = vectors if vectors.dtype == torch.float64 else vectors.float()
    weight = counted[:, None, :, None].to(x.dtype)
    count = counted.sum(1).to(x.dtype)
    mean = (x * weight).sum(2) / count.clamp(min=1)[:, None, None]
    centred = (x - mean[:, :, None]) * weight
    return Gaussian(count, mean, centred.mT @ centred)


def upcoming(queries: Gaussian, bands: Bands, start: torch.Tensor, ahead: int) -> tuple[torch.Tensor, ...]:
    """Return mean [B, Hq, D] and covariance [B, Hq, D, D] after the mean rotation of the next positions.

    These are start, ..., start + ahead - 1, `start` [1 or B]. The result has the order of cached keys.
    """
    turn = bands.scaling * bands.phases(start)  # [B or 1, F]
    turn = turn * gain(bands, list(range(ahead))).to(turn.device)

    def turned(x: torch.Tensor) -> torch.Tensor:
        turning, still = bands.tapped(x)
        by = turn.reshape(turn.shape[0], *[1] * (x.dim() - 2), -1)
        return bands.joined(turning * by.to(turning.device, turning.dtype), still)

    return turned(queries.mean), turned(turned(queries.covariance).mT)


def expected_logits(
    keys: torch.Tensor, mean: torch.Tensor, covariance: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Return the log of the mean of exp(scale q k) over Gaussian queries q, [B, Hq, S].

    That is scale mean k + scale^2 k covariance k / 2, for keys [B, Hk, S, D].
    """
    heads = keys.shape[1]
    keys = keys.to(mean.dtype)
    mean = mean.unflatten(1, (heads, -1))  # [B, Hk, group, D]
    logits = scale * (keys @ mean.mT).mT
    if covariance is not None:
        spread = covariance.unflatten(1, (heads, -1))
        parts = [
            ((part[:, :, None] @ spread) * part[:, :, None]).sum(-1) for part in keys.split(BLOCK, dim=2)
        ]
        logits = logits + scale**2 / 2 * torch.cat(parts, dim=-1)
    return logits.flatten(1, 2)
