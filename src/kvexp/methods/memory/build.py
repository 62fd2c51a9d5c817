"""From samples to entries: cluster the queries of each codebook, then aggregate the states of each cluster.

Everything streams over the store's blocks, one layer at a time, so that memory does not grow with the number
of traces. The final pass assigns every sample once more to the finished centroids (`method.final`: by the
distance that clustering used, or by the cosine that lookups use) and builds the states from scratch, so that
no entry holds members from early, drifting centroids. Several processes may build one layer together, each
from a share of its samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvexp.methods.memory.grouping import Grouping
from kvexp.methods.memory.lookup import log_z_shift
from kvexp.methods.memory.states import LayerMemory
from kvexp.stats import kmeans, whiten
from kvexp.stats.ridge import RidgeRegression
from kvexp.stats.samples import SampleStore
from kvexp.stats.shares import WHOLE, Shares
from kvexp.stats.states import StateAccumulator
from kvexp_kernels.lookup import quantise_keys

BLOCK_BYTES = 16 << 20  # size of a block of queries
IN_MEMORY_BYTES = 192 << 20  # queries are read once, and not at each pass, up to this size: a fixed bound
WHITEN_SAMPLES = 20_000


class LayerBuilder:
    """Builds the entries of one layer from a sample store; distances are computed on `device`."""

    def __init__(
        self,
        method: Any,
        store: SampleStore,
        layer: int,
        grouping: Grouping,
        k: int,
        seed: int,
        device: torch.device | str = "cpu",
        shares: Shares = WHOLE,
    ) -> None:
        self.method, self.store, self.layer, self.device = method, store, layer, device
        self.shares, self.rows = shares, shares.rows(store.count(layer))
        self.grouping, self.k, self.seed = grouping, k, seed
        q = store.fields["q"]
        self._row_bytes = math.prod(q.shape) * (8 if q.dtype == "float64" else 4)
        self.block = max(256, BLOCK_BYTES // self._row_bytes)
        self.whiten: Tensor | None = None

    def build(self) -> LayerMemory:
        """Cluster, aggregate, and fit the corrections that the method asks for."""
        if self.method.whiten != "none":
            self.whiten = self.shares.once(self._whitening)["whiten"]
        tensors = self._aggregate(self._clusters())
        if self.whiten is not None:
            tensors["whiten"] = self.whiten
        memory = LayerMemory(self.grouping, tensors)
        if self.method.residual:
            memory.tensors["residual"] = self._residual(memory)
        return memory

    def blocks(self, fields: Sequence[str] | None = None) -> Iterator[dict[str, Tensor]]:
        """Read this process's share of the layer."""
        return self.store.blocks(self.layer, self.block, fields, self.rows)

    def _whitening(self) -> dict[str, Tensor]:
        sample = self.store.sample(self.layer, WHITEN_SAMPLES, self.seed, ["q"])["q"]
        return {"whiten": whiten.whitening_matrix(sample, diagonal=self.method.whiten == "diagonal")}

    def keys(self, q: Tensor) -> Tensor:
        """[n, Hq, D] -> key-space samples [C, n', h*D], whitened where the method says so."""
        q = q.to(self.device)
        if self.whiten is not None:
            q = whiten.whiten(q, self.whiten.to(self.device))
        return self.grouping.split(q).flatten(-2)

    def _read_keys(self) -> Iterator[Tensor]:
        for block in self.blocks(["q"]):
            yield self.keys(block["q"])

    def _clusters(self) -> list[Tensor]:
        """Return the centroids [K', h*D] of each codebook, K' <= K."""
        if self.method.kmeans == "minibatch" and self.shares.count > 1:  # one batch moves what the next sees
            return self._by_one()
        kept = list(self._read_keys()) if self._fits(1) else None
        return [self._cluster(book, self._stream(book, kept)) for book in range(self.grouping.codebooks)]

    def _by_one(self) -> list[Tensor]:
        """The centroids as the first process finds them alone."""

        def alone() -> dict[str, Tensor]:
            builder = LayerBuilder(
                self.method, self.store, self.layer, self.grouping, self.k, self.seed, self.device
            )
            builder.whiten = self.whiten
            return {str(book): found for book, found in enumerate(builder._clusters())}

        found = self.shares.once(alone)
        return [found[str(book)].to(self.device) for book in range(self.grouping.codebooks)]

    def _fits(self, parts: int) -> bool:
        """Whether one of so many equal parts of the queries read here may be held in memory."""
        return self._row_bytes * len(self.rows) <= IN_MEMORY_BYTES * parts

    def _stream(self, book: int, kept: list[Tensor] | None) -> kmeans.Blocks:
        """The samples of one codebook: from memory, where they or the whole layer fit, else from disk."""
        if kept is not None:
            views = [keys[book] for keys in kept]
            return lambda: iter(views)
        if self._fits(self.grouping.codebooks):
            own = [keys[book].clone() for keys in self._read_keys()]
            return lambda: iter(own)

        def again() -> Iterator[Tensor]:
            for keys in self._read_keys():
                yield keys[book]

        return again

    def _cluster(self, book: int, blocks: kmeans.Blocks) -> Tensor:
        method, seed = self.method, (self.seed * 1000 + self.layer) * 1000 + book
        options: dict[str, Any] = {"metric": method.metric, "init": method.init, "backend": method.backend}
        if method.kmeans == "lloyd":
            options |= {"shares": self.shares, "before": self.rows.start * self.grouping.samples}
            return kmeans.lloyd(blocks, self.k, method.iterations, seed, **options).centroids
        return kmeans.minibatch(blocks, self.k, seed, passes=method.iterations, **options).centroids

    def _aggregate(self, centroids: list[Tensor]) -> dict[str, Tensor]:
        """Final pass: states, counts and spread of every entry, padded to one K over codebooks."""
        method, grouping = self.method, self.grouping
        extras: dict[str, tuple[int, ...]] = {"length": ()}
        if method.slope:
            extras["slope"] = (grouping.heads, self.store.fields["slope"].shape[-1])
        shape = grouping.heads, self.store.fields["a"].shape[-1], centroids[0].dtype
        sums = [StateAccumulator(len(c), *shape, method.aggregate, extras) for c in centroids]
        directions = [F.normalize(c, dim=-1) for c in centroids]
        for block in self.blocks():
            keys = self.keys(block["q"])
            states = {name: grouping.split(block[name]) for name in block if name != "q"}
            for book, acc in enumerate(sums):
                index = kmeans.assign(keys[book], centroids[book], method.final, method.backend)
                length = (keys[book] * directions[book][index]).sum(-1).cpu()
                acc.add(index.cpu(), **{name: x[book] for name, x in states.items()}, length=length)
        sums = [self.shares.total(acc) for acc in sums]
        parts = [self._entries(acc, keys.cpu()) for acc, keys in zip(sums, directions, strict=True)]
        most = max(len(part["count"]) for part in parts)
        return {name: torch.stack([_padded(part[name], most) for part in parts]) for name in parts[0]}

    def _entries(self, acc: StateAccumulator, directions: Tensor) -> dict[str, Tensor]:
        """The entries of one codebook that have samples."""
        states = acc.finish()
        entries = {
            "keys": directions,
            "norm": acc.mean("length"),
            "a": states.a,
            "log_z": states.log_z,
            "count": states.counts,
            "std": states.std_s,
        }
        if self.method.slope:
            entries["slope"] = acc.mean("slope")
        return {name: x[states.counts > 0] for name, x in entries.items()}

    def _residual(self, memory: LayerMemory) -> Tensor:
        """Fit (a - a_k, s - s_k) on (q - q_k) by ridge regression, on the entries that lookups choose.

        s_k includes the first-order term where the memory has one, since lookups add both.
        """
        books, _, width = memory.keys.shape
        heads, dv = memory.a.shape[-2:]
        fits = [RidgeRegression(width, heads * (dv + 1)) for _ in range(books)]
        found = memory.keys.to(self.device)
        for block in self.blocks():
            keys = self.keys(block["q"])
            a, s = self.grouping.split(block["a"]), self.grouping.split(block["s"])
            for book, fit in enumerate(fits):
                index = kmeans.assign(keys[book], found[book], "cosine", self.method.backend).cpu()
                chosen = {name: memory.tensors[name][book][index] for name in ("keys", "norm", "a", "log_z")}
                offset = keys[book].cpu() - chosen["keys"] * chosen["norm"][:, None]
                left = s[book] - chosen["log_z"]
                if memory.slope is not None:
                    left = left - log_z_shift(offset, memory.slope[book][index])
                fit.add(offset, torch.cat([a[book] - chosen["a"], left[..., None]], -1).flatten(1))
        fits = [self.shares.total(fit) for fit in fits]
        return torch.stack([fit.solve(self.method.ridge) for fit in fits]).to(memory.keys.dtype)


def _padded(x: Tensor, length: int) -> Tensor:
    """Repeat entry 0 up to `length`: ties go to the lower index, so the copies are never chosen."""
    return torch.cat([x, x[:1].expand(length - len(x), *x.shape[1:])]) if len(x) < length else x


def stored(memory: LayerMemory, dtype: torch.dtype, int8: bool) -> LayerMemory:
    """Return the memory as it is kept: keys and a in the model's dtype, or int8 with a scale per vector."""
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
