"""K-means over samples that do not fit in memory.

The input is a callable that returns a fresh iterator of `[n, d]` blocks: each pass reads the stream once.
`lloyd` makes full passes. `minibatch` moves centroids as it reads, as Attention-State Memory does trace by
trace (a centroid is the running mean of what it was given, no decay), and ends with one full pass, which
cures members gone stale. The paper states neither metric nor initialisation: plain L2 and random distinct
samples are the defaults here; with "cosine", rows and centroids have unit length (spherical k-means).
Deterministic given the seed; equal distances go to the lower number; how the stream is cut into blocks
matters to `lloyd` only by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvexp.stats.nearest import METRICS, assign, check_choice, unit
from kvexp.stats.pool import DistinctPool

__all__ = ["Blocks", "Clusters", "assign", "lloyd", "minibatch"]

Blocks = Callable[[], Iterator[Tensor]]

INITS = ("random", "kmeans++")
SPARE = 256  # farthest samples remembered in a pass, to replace dead centroids
ROUNDS = 64  # groups in which kmeans++ draws
CANDIDATES = 8  # distinct samples per centroid among which kmeans++ chooses


@dataclass(frozen=True)
class Clusters:
    """Outcome of k-means."""

    centroids: Tensor  # [k_effective, d], in the dtype of the samples; unit length for cosine
    counts: Tensor  # [k_effective] int64, samples assigned in the last full pass
    objective: tuple[float, ...]  # mean squared distance to the centroid, per full pass, before its update

    @property
    def k_effective(self) -> int:
        """Number of centroids: below the k asked for when distinct samples or live clusters ran out."""
        return len(self.centroids)


@dataclass
class _Pass:
    """What was found so far in one reading of the stream."""

    counts: Tensor  # [k]
    shift: Tensor  # [k, d], sum of sample minus its centroid
    total: Tensor  # sum of squared distances, float64
    farthest: DistinctPool

    @classmethod
    def empty(cls, centroids: Tensor) -> _Pass:
        counts = torch.zeros(len(centroids), dtype=torch.int64, device=centroids.device)
        total = torch.zeros((), dtype=torch.float64, device=centroids.device)
        return cls(counts, torch.zeros_like(centroids), total, DistinctPool(min(len(centroids), SPARE)))

    def add(self, x: Tensor, centroids: Tensor, metric: str, backend: str) -> None:
        """Assign the rows `x [n, d]` to fixed centroids."""
        index = assign(x, centroids, metric, backend)
        gap = x - centroids[index]
        distance = gap.square().sum(dim=1)
        self.counts.index_add_(0, index, torch.ones_like(index))
        self.shift.index_add_(0, index, gap)
        self.total += distance.sum(dtype=torch.float64)
        self.farthest.offer(x, -distance)


def lloyd(
    blocks: Blocks,
    k: int,
    iterations: int,
    seed: int,
    metric: str = "l2",
    backend: str = "auto",
    init: str | Tensor = "random",
) -> Clusters:
    """Full Lloyd iterations; reads the stream `iterations + 1` times, fewer once the objective stops falling.

    `init` is "random" (distinct samples, uniformly), "kmeans++" (on a random subset of distinct samples), or
    the starting centroids `[k, d]`. A centroid without samples moves to one of the farthest samples; those
    empty in the last pass are dropped. Where there are at most k distinct samples, each becomes a centroid.
    Raises ValueError on an empty stream or `iterations < 1`.
    """
    if iterations < 1:
        raise ValueError(f"k-means needs at least one iteration, not {iterations}")
    stream = _prepared(blocks, metric)
    centroids, exact = _start(stream, k, seed, init, metric)
    return _lloyd_from(stream, centroids, exact, iterations, metric, backend)


def minibatch(
    blocks: Blocks,
    k: int,
    seed: int,
    passes: int = 1,
    metric: str = "l2",
    backend: str = "auto",
    init: str | Tensor = "random",
    batch: int = 1024,
) -> Clusters:
    """Streaming k-means: `passes` readings that move centroids after every `batch` rows, then one full pass.

    A centroid is the running mean of all rows that it was given since the start. `init`, dead centroids, few
    distinct samples and errors as for `lloyd`; reads the stream `passes + 2` times.
    """
    stream = _prepared(blocks, metric)
    centroids, exact = _start(stream, k, seed, init, metric)
    counts = torch.zeros(len(centroids), dtype=torch.int64, device=centroids.device)
    for _ in range(0 if exact else passes):
        found = _Pass.empty(centroids)
        for block in stream():
            for x in block.split(batch):
                found.shift.zero_()
                found.add(x, centroids, metric, backend)
                centroids = _moved(centroids, found.shift, counts + found.counts, metric)
        counts += found.counts
        centroids = _revived(centroids, counts, found.farthest)
    return _lloyd_from(stream, centroids, exact, 1, metric, backend)


def _prepared(blocks: Blocks, metric: str) -> Blocks:
    """The stream itself, or with rows of unit length for cosine; empty blocks left out."""
    check_choice("k-means metric", metric, METRICS)
    return lambda: (unit(x) if metric == "cosine" else x for x in blocks() if len(x))


def _start(stream: Blocks, k: int, seed: int, init: str | Tensor, metric: str) -> tuple[Tensor, bool]:
    """Starting centroids, and whether they are all the distinct samples there are."""
    if isinstance(init, Tensor):
        return (unit(init) if metric == "cosine" else init), False
    check_choice("k-means init", init, INITS)
    rng = np.random.default_rng(seed)
    pool = DistinctPool(k if init == "random" else CANDIDATES * k)
    device = torch.device("cpu")
    for x in stream():
        pool.offer(x, torch.from_numpy(rng.random(len(x))))
        device = x.device
    rows = pool.rows.to(device)
    if not len(rows):
        raise ValueError("k-means was given no samples")
    exact = not pool.overflow and len(rows) <= k
    return (rows if exact or init == "random" else _plus_plus(rows, k, rng)), exact


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


def _lloyd_from(
    stream: Blocks, centroids: Tensor, exact: bool, iterations: int, metric: str, backend: str
) -> Clusters:
    """Lloyd iterations from given centroids; `exact` centroids are counted and left as they are."""
    objective: list[float] = []
    for step in range(iterations):
        found = _Pass.empty(centroids)
        for x in stream():
            found.add(x, centroids, metric, backend)
        size = int(found.counts.sum())
        if not size:
            raise ValueError("k-means was given no samples")
        objective.append(float(found.total) / size)
        if exact:
            return Clusters(centroids, found.counts, tuple(objective))
        if step and objective[-2] - objective[-1] <= 4 * torch.finfo(centroids.dtype).eps * objective[-2]:
            break  # what still moves is rounding
        centroids = _moved(centroids, found.shift, found.counts, metric)
        if step < iterations - 1:
            centroids = _revived(centroids, found.counts, found.farthest)
    live = found.counts > 0
    return Clusters(centroids[live], found.counts[live], tuple(objective))


def _moved(centroids: Tensor, shift: Tensor, counts: Tensor, metric: str) -> Tensor:
    """Centroids moved to the mean of their samples, which lies `shift / counts` away."""
    moved = centroids + shift / counts.clamp(min=1).unsqueeze(1)
    if metric == "l2":
        return moved
    # Samples that cancel out have no mean direction: the centroid stays.
    return torch.where(moved.norm(dim=1, keepdim=True) > 0, unit(moved), centroids)


def _revived(centroids: Tensor, counts: Tensor, farthest: DistinctPool) -> Tensor:
    """Centroids with those without samples put on the farthest samples, as far as there are any."""
    dead = (counts == 0).nonzero().flatten()
    spare = farthest.rows[farthest.priority < 0][: len(dead)]
    revived = centroids.clone()
    revived[dead[: len(spare)]] = spare.to(centroids)
    return revived
