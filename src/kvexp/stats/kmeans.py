"""K-means over samples that do not fit in memory.

The input is a callable that returns a fresh iterator of `[n, d]` blocks: each pass reads the stream once.
`lloyd` makes full passes. `minibatch` moves centroids as it reads, as Attention-State Memory does trace by
trace (a centroid is the running mean of what it was given, no decay), and ends with one full pass, which
cures members gone stale. The paper states neither metric nor initialisation: plain L2 and random distinct
samples are the defaults here; with "cosine", rows and centroids have unit length (spherical k-means).
Several processes may each read a share of the stream (`stats.shares`): `lloyd` then sums what they find in
each pass. Deterministic given the seed; equal distances go to the lower number; how the stream is cut, into
blocks or shares, matters to `lloyd` only by rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp.stats.nearest import METRICS, assign, check_choice, unit
from kvexp.stats.pool import DistinctPool
from kvexp.stats.seeding import Blocks, start
from kvexp.stats.shares import WHOLE, Shares

__all__ = ["Blocks", "Clusters", "assign", "lloyd", "minibatch"]

SPARE = 256  # farthest samples remembered in a pass, to replace dead centroids


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

    def merge(self, other: _Pass) -> None:
        """Take in what was found in another share of the stream."""
        self.counts, self.shift = self.counts + other.counts, self.shift + other.shift
        self.total = self.total + other.total
        self.farthest.merge(other.farthest)

    def state(self) -> dict[str, Tensor]:
        """Return all that it holds."""
        far = {f"farthest.{name}": tensor for name, tensor in self.farthest.state().items()}
        return {"counts": self.counts, "shift": self.shift, "total": self.total, **far}

    def restored(self, state: dict[str, Tensor]) -> _Pass:
        """Return another one that holds `state`."""
        device, far = self.shift.device, "farthest."
        farthest = {name.removeprefix(far): x for name, x in state.items() if name.startswith(far)}
        counts, shift, total = (state[name].to(device) for name in ("counts", "shift", "total"))
        return _Pass(counts, shift, total, self.farthest.restored(farthest))


def lloyd(
    blocks: Blocks,
    k: int,
    iterations: int,
    seed: int,
    metric: str = "l2",
    backend: str = "auto",
    init: str | Tensor = "random",
    shares: Shares = WHOLE,
    before: int = 0,
) -> Clusters:
    """Full Lloyd iterations; reads the stream `iterations + 1` times, fewer once the objective stops falling.

    `init` is "random" (distinct samples, uniformly), "kmeans++" (on a random subset of distinct samples), or
    the starting centroids `[k, d]`. A centroid without samples moves to one of the farthest samples; those
    empty in the last pass are dropped. Where there are at most k distinct samples, each becomes a centroid.
    With `shares`, the stream is this process's share, `before` rows stand in the earlier ones, and all find
    the same clusters. Raises ValueError on an empty stream or `iterations < 1`.
    """
    if iterations < 1:
        raise ValueError(f"k-means needs at least one iteration, not {iterations}")
    stream = _prepared(blocks, metric)
    centroids, exact = start(stream, k, seed, init, metric, shares, before)
    return _lloyd_from(stream, centroids, exact, iterations, metric, backend, shares)


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
    centroids, exact = start(stream, k, seed, init, metric)
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


def _lloyd_from(
    stream: Blocks,
    centroids: Tensor,
    exact: bool,
    iterations: int,
    metric: str,
    backend: str,
    shares: Shares = WHOLE,
) -> Clusters:
    """Lloyd iterations from given centroids; `exact` centroids are counted and left as they are."""
    objective: list[float] = []
    for step in range(iterations):
        found = _Pass.empty(centroids)
        for x in stream():
            found.add(x, centroids, metric, backend)
        found = shares.total(found)
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
