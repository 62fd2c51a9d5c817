"""Trigonometric scores: the logit that a key can expect from queries that look like their mean.

A query with pre-RoPE mean m_f in band f, asked at position t + d, gives a key k_f of position p the score

    sum_f s^2 |m_f| |k_f| cos(w_f (t + d - p) + arg m_f - arg k_f),

where w_f are the model's frequencies and s its attention scaling. Its mean over offsets d is

    Re sum_f s m_f E_f exp(i w_f t) conj(c_f),    E_f = mean_d exp(i w_f d),

with the key c_f as it is cached (rotated, with one s in it): one dot product, no position of a row, no RoPE
to undo. `cosines` is the slow form, which knows each offset apart.

Notation: Hq query heads, Hk heads of keys, S rows, F bands, N numbers that do not rotate (their part of a
score is an ordinary dot product with the mean).
"""

from __future__ import annotations

from typing import Literal

import torch

from kvexp.attention.bands import Bands, wide
from kvexp.cache.rows import over_heads
from kvexp.stats.moments import Moments
from kvexp_kernels.trig_score import Spread, trig_score
from kvexp_kernels.trig_score.reference import spread_score

BLOCK = 1024  # rows whose cosines stand in memory at once
Norm = Literal["weighted", "unweighted", "variance"]


def offsets(kind: Literal["geometric", "linear"], largest: int) -> list[int]:
    """Return how far ahead queries are expected: 1, 2, 4, ... up to `largest`, or as many at equal steps.

    Equal steps start at 1 too, and end at `largest` + 1: 17 of 4,096 tokens for 65,536.
    """
    powers = [1 << i for i in range(largest.bit_length())]
    if kind == "geometric" or len(powers) == 1:
        return powers
    return [1 + i * largest // (len(powers) - 1) for i in range(len(powers))]


def gain(bands: Bands, ahead: list[int], smooth: bool = False) -> torch.Tensor:
    """Return E_f [F] complex128, what averaging over offsets does to a band.

    `smooth` spreads each offset d into an exponential waiting time of mean d, whose gain 1 / (1 - i w d) is a
    low-pass without the spikes that single offsets leave at high frequencies.
    """
    if smooth:
        delays = torch.tensor(ahead, dtype=torch.float64)[:, None]
        angles = delays * bands.inv_freq
        return (1 / torch.complex(torch.ones_like(angles), -angles)).mean(0)
    return bands.phases(torch.tensor(ahead)).mean(0)


def centre(moments: Moments, bands: Bands, gains: torch.Tensor, upcoming: torch.Tensor) -> torch.Tensor:
    """Return the vectors [B, Hq, D] float64 whose dot product with a cached key is its expected score.

    moments [Hq, F] or [B, Hq, F]; gains [F]; upcoming [B], the position of the next token of each sequence.
    """
    turn = bands.phases(upcoming) * gains.to(wide(upcoming).device)  # [B, F]
    mean = moments.mean.to(turn.device, torch.complex128)
    turning = bands.scaling * mean * turn[:, None]
    still = wide(moments.still_mean).to(turn.device)
    return bands.joined(turning, still.expand(*turning.shape[:2], -1))


def against(keys: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Return the dot products [B, Hq, S] of keys [B, Hk, S, D] with a vector [B or 1, Hq, D] a query head."""
    return trig_score(keys, vectors)


def cosines(
    keys: torch.Tensor,
    positions: torch.Tensor,
    moments: Moments,
    bands: Bands,
    ahead: list[int],
    upcoming: torch.Tensor,
    aggregate: Literal["mean", "max"] = "mean",
) -> torch.Tensor:
    """Return expected scores [B, Hq, S] float64, RoPE undone, with a cosine for each offset, row and band.

    keys [B, Hk, S, D] as cached, positions [B, Hk or 1, S] of the rows, the rest as for `centre`.
    """
    moments = moments.to(keys.device)
    queries = moments.mean.shape[-2]
    parts = []
    for at in range(0, keys.shape[2], BLOCK):
        rows = slice(at, at + BLOCK)
        where = positions[:, :, rows]
        turning, still = bands.turned_back(wide(keys[:, :, rows]), where)
        mean, turning = moments.mean[..., None, :], over_heads(turning, queries)
        size = bands.scaling**2 * mean.abs() * turning.abs()  # [B, Hq, S, F]
        angle = mean.angle() - turning.angle()
        distance = over_heads(wide(upcoming)[:, None, None] - where, queries)[..., None]
        total: torch.Tensor | None = None
        for offset in ahead:
            one = (size * (bands.inv_freq.to(size.device) * (distance + offset) + angle).cos()).sum(-1)
            if total is None:
                total = one
            else:
                total = total + one if aggregate == "mean" else torch.maximum(total, one)
        assert total is not None
        rest = (moments.still_mean[..., None, :] * over_heads(still, queries)).sum(-1)
        parts.append((total / len(ahead) if aggregate == "mean" else total) + rest)
    return torch.cat(parts, dim=-1)


def norms(keys: torch.Tensor, moments: Moments, bands: Bands, kind: Norm, scale: float) -> torch.Tensor:
    """Return what the spread of the queries around their mean adds to a score, [B, Hq, S].

    `weighted`: s^2 sum_f (E|q_f| - |E q_f|) |k_f|. `unweighted`: s^2 sum_f E|q_f| |k_f|. `variance`: half the
    variance of the scaled logit, over `scale`: with it, `scale` times the score is the log of the mean of
    exp(scale q k) over Gaussian queries (to second order over any) that spread evenly within each band and
    independently between bands. Numbers that do not rotate count as bands of one number each.
    """
    return spread_score(keys, spread(moments, bands, kind, scale))


def spread(moments: Moments, bands: Bands, kind: Norm, scale: float) -> Spread:
    """Return the weights of `norms`, as the kernel takes them."""
    s = bands.scaling
    if kind == "variance":  # |c_f|^2 needs no band: both numbers of one are squared and get its weight
        weight = 0.25 * scale * s**2 * moments.variance
        vectors = bands.joined(torch.complex(weight, weight), 0.5 * scale * moments.still_variance)
        return Spread(_of_sequences(vectors), bands.count, squares=True)
    if kind == "unweighted":
        weights = [s * moments.magnitude, moments.still_magnitude]
    else:
        around = moments.magnitude - moments.mean.abs()
        weights = [s * around, moments.still_magnitude - moments.still_mean.abs()]
    adjacent = bands.after == "adjacent"
    return Spread(_of_sequences(torch.cat(weights, dim=-1)), bands.count, adjacent, bands.last)


def _of_sequences(vectors: torch.Tensor) -> torch.Tensor:
    """[Hq, n] or [B, Hq, n] -> [1 or B, Hq, n]."""
    return vectors if vectors.dim() == 3 else vectors[None]
