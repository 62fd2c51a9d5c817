"""From samples to entries: cluster the queries of each codebook, then aggregate the states of each cluster.

Everything streams over the store's blocks, one layer at a time, so that memory does not grow with the number of
traces. The final pass assigns every sample once more to the finished centroids (`method.final`: by the distance
that clustering used, or by the cosine that lookups use) and rebuilds the states from scratch, so that no entry
holds members from early, drifting centroids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvexp.methods.memory.grouping import Grouping
from kvexp.methods.memory.states import LayerMemory
from kvexp.stats import kmeans, whiten
from kvexp.stats.ridge import RidgeRegression
from kvexp.stats.samples import SampleStore
from kvexp.stats.states import StateAccumulator
from kvexp_kernels.lookup.reference import quantise_keys

BLOCK_BYTES = 16 << 20  # size of a block of queries in float32
IN_MEMORY_BYTES = 192 << 20  # a layer's queries stay in memory up to this size: a fixed bound, not the data's
WHITEN_SAMPLES = 20_000

Block = dict[str, Tensor]


class LayerBuilder:
    """Builds the entries of one layer from a sample store."""

    def __init__(self, method: Any, store: SampleStore, layer: int, grouping: Grouping, k: int, seed: int) -> None:
        self.method, self.store, self.layer = method, store, layer
        self.grouping, self.k, self.seed = grouping, k, seed
        self.width = math.prod(store.fields["q"].shape)
        self.block = max(256, BLOCK_BYTES // (4 * self.width))
        self.whiten: Tensor | None = None
        self._kept: list[Tensor] | None = None

    def build(self) -> LayerMemory:
        """Cluster, aggregate, and fit the corrections that the method asks for."""
        if self.method.whiten != "none":
            sample = self.store.sample(self.layer, WHITEN_SAMPLES, self.seed, ["q"])["q"]
            self.whiten = whiten.whitening_matrix(sample, diagonal=self.method.whiten == "diagonal")
        if 4 * self.width * self.store.count(self.layer) <= IN_MEMORY_BYTES:
            self._kept = list(self._read_keys())
        centroids = [self._cluster(book) for book in range(self.grouping.codebooks)]
        tensors = self._aggregate(centroids)
        if self.whiten is not None:
            tensors["whiten"] = self.whiten
        memory = LayerMemory(self.grouping, tensors)
        if self.method.residual:
            memory.tensors["residual"] = self._residual(memory)
        return memory

    def _read_keys(self) -> Iterator[Tensor]:
        for block in self.store.blocks(self.layer, self.block, ["q"]):
            yield self.keys(block["q"])

    def keys(self, q: Tensor) -> Tensor:
        """[n, Hq, D] -> key-space samples [C, n', h*D], whitened where the method says so."""
        if self.whiten is not None:
            q = whiten.whiten(q, self.whiten)
        return self.grouping.split(q).flatten(-2)

    def _blocks(self, book: int) -> Callable[[], Iterator[Tensor]]:
        def stream() -> Iterator[Tensor]:
            for keys in self._kept if self._kept is not None else self._read_keys():
                yield keys[book]

        return stream

    def _cluster(self, book: int) -> Tensor:
        """Return the centroids [K', h*D] of one codebook, K' <= K."""
        method, seed = self.method, self.seed * 1000 + self.layer * 16 + book
        options = {"metric": method.metric, "init": method.init, "backend": method.backend}
        if method.kmeans == "lloyd":
            found = kmeans.lloyd(self._blocks(book), self.k, method.iterations, seed, **options)
        else:
            found = kmeans.minibatch(self._blocks(book), self.k, seed, passes=method.iterations, **options)
        return found.centroids

    def _aggregate(self, centroids: list[Tensor]) -> dict[str, Tensor]:
        """Final pass: states, counts and spread of every entry, padded to one K over codebooks."""
        method, grouping = self.method, self.grouping
        dv, dtype = self.store.fields["a"].shape[-1], centroids[0].dtype
        extras = {"slope": (grouping.heads, self.store.fields["slope"].shape[-1])} if method.slope else {}
        sums = [StateAccumulator(len(c), grouping.heads, dv, dtype, method.aggregate, extras) for c in centroids]
        for block in self.store.blocks(self.layer, self.block):
            keys = self.keys(block["q"])
            states = {name: grouping.split(block[name]) for name in block if name != "q"}
            for book, (acc, found) in enumerate(zip(sums, centroids, strict=True)):
                index = kmeans.assign(keys[book], found, method.final, method.backend)
                acc.add(index, **{name: x[book] for name, x in states.items()})
        parts = [
            self._entries(acc, found) for acc, found in zip(sums, centroids, strict=True)
        ]
        most = max(len(part["count"]) for part in parts)
        return {name: torch.stack([_padded(part[name], most) for part in parts]) for name in parts[0]}

    def _entries(self, acc: StateAccumulator, centroids: Tensor) -> dict[str, Tensor]:
        states = acc.finish()
        live = states.counts > 0
        entries = {
            "keys": F.normalize(centroids, dim=-1),
            "norm": centroids.norm(dim=-1),
            "a": states.a,
            "log_z": states.log_z,
            "count": states.counts,
            "std": states.std_s,
        }
        if self.method.slope:
            entries["slope"] = acc.mean("slope")
        return {name: x[live] for name, x in entries.items()}

    def _residual(self, memory: LayerMemory) -> Tensor:
        """Fit (a - a_k, s - s_k) on (q - q_k) by ridge regression, on the entries that lookups choose."""
        books, _, width = memory.keys.shape
        heads, dv = memory.a.shape[-2:]
        fits = [RidgeRegression(width, heads * (dv + 1)) for _ in range(books)]
        for block in self.store.blocks(self.layer, self.block):
            keys = self.keys(block["q"])
            a, s = self.grouping.split(block["a"]), self.grouping.split(block["s"])
            for book, fit in enumerate(fits):
                index = kmeans.assign(keys[book], memory.keys[book], "cosine", self.method.backend)
                centroid = memory.keys[book][index] * memory.norm[book][index][:, None]
                left = torch.cat([a[book] - memory.a[book][index], (s[book] - memory.log_z[book][index])[..., None]], -1)
                fit.add(keys[book] - centroid, left.flatten(1))
        return torch.stack([fit.solve(self.method.ridge) for fit in fits]).to(memory.keys.dtype)


def _padded(x: Tensor, length: int) -> Tensor:
    """Repeat entry 0 up to `length`: ties go to the lower index, so the copies are never chosen."""
    return torch.cat([x, x[:1].expand(length - len(x), *x.shape[1:])]) if len(x) < length else x


def stored(memory: LayerMemory, dtype: torch.dtype, int8: bool) -> LayerMemory:
    """Return the memory as it is kept: keys and outputs in the model's dtype, or int8 with a scale per vector."""
    tensors = dict(memory.tensors)
    if int8:
        tensors["keys"], tensors["key_scale"] = quantise_keys(tensors["keys"])
        tensors["a"], tensors["a_scale"] = quantise_keys(tensors["a"])
    else:
        tensors |= {name: tensors[name].to(dtype) for name in ("keys", "a")}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tensors["log_z"] = tensors["log_z"].to(wide)
    for name in ("norm", "residual", "slope", "whiten", "std"):
        if name in tensors:
            tensors[name] = tensors[name].to(wide)
    return LayerMemory(memory.grouping, tensors)
