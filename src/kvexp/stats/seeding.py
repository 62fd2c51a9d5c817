"""Where k-means starts: distinct samples of a stream, at random or far from each other (kmeans++)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from kvexp.stats.nearest import check_choice, unit
from kvexp.stats.pool import DistinctPool
from kvexp.stats.shares import WHOLE, Shares

Blocks = Callable[[], Iterator[Tensor]]

INITS = ("random", "kmeans++")
ROUNDS = 64  # groups in which kmeans++ draws
CANDIDATES = 8  # distinct samples per centroid among which kmeans++ chooses


def start(
    stream: Blocks,
    k: int,
    seed: int,
    init: str | Tensor,
    metric: str,
    shares: Shares = WHOLE,
    before: int = 0,
) -> tuple[Tensor, bool]:
    """Starting centroids, and whether they are all the distinct samples there are."""
    if isinstance(init, Tensor):
        return (unit(init) if metric == "cosine" else init), False
    check_choice("k-means init", init, INITS)
    rng = _draws(seed, before)
    pool = DistinctPool(k if init == "random" else CANDIDATES * k)
    device = torch.device("cpu")
    for x in stream():
        pool.offer(x, torch.from_numpy(rng.random(len(x))))
        device = x.device
    pool = shares.total(pool)
    rows = pool.rows.to(device)
    if not len(rows):
        raise ValueError("k-means was given no samples")
    exact = not pool.overflow and len(rows) <= k
    if exact or init == "random":
        return rows, exact
    return _plus_plus(rows, k, _draws(seed, pool.offered)), exact


def _draws(seed: int, drawn: int) -> np.random.Generator:
    """Random numbers as they follow the first `drawn` of a seed."""
    bits = np.random.PCG64(seed)
    bits.advance(drawn)
    return np.random.Generator(bits)


def _plus_plus(rows: Tensor, k: int, rng: np.random.Generator) -> Tensor:
    """Choose k of the rows, each with probability proportional to its squared distance to those chosen.

    Rows are drawn in ROUNDS groups without replacement, and distances brought up to date after each group: a
    group costs one matrix product instead of one pass over the rows for each centroid.
    """
    chosen = [int(rng.integers(len(rows)))]
    squares = rows.square().sum(dim=1)
    distance = torch.full_like(squares, torch.inf)
    group, fresh = max(1, k // ROUNDS), chosen[:]
    while len(chosen) < k:
        near = squares[:, None] - 2 * rows @ rows[fresh].T + squares[fresh]
        distance = torch.minimum(distance, near.min(dim=1).values.clamp(min=0))
        distance[fresh] = 0
        noise = torch.from_numpy(rng.gumbel(size=len(rows))).to(distance.device)
        score = distance.double().log() + noise  # its top n are n draws without replacement
        fresh = score.topk(min(group, k - len(chosen))).indices.sort().values.tolist()
        chosen += fresh
    return rows[chosen]
