"""Add a chunk of prefix to a finished memory: the traces run over that chunk alone, entries keep their keys' cells.

`chunk_merge=mean` pools the new samples with the old ones (the paper's reading: log Z is a mean over samples of all
chunks), `sum` adds the new chunk's mass to each entry's, as exact composition of disjoint chunks would.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from kvexp.errors import UserError
from kvexp.methods.memory.build import LayerBuilder
from kvexp.methods.memory.collect import encode_chunks
from kvexp.methods.memory.prepare import collected
from kvexp.methods.memory.states import LayerMemory, StateMemory
from kvexp.stats import kmeans
from kvexp.stats.states import StateAccumulator, States
from kvexp_kernels.merge_states.reference import merge_states


def update(method: Any, model: Any, memory: StateMemory, calibration: Any, context: Any) -> StateMemory:
    """Return a memory of `context`, made from `memory` and one pass over `calibration.context`, the new chunk."""
    if method.entries == "int8" or method.residual or method.slope:
        raise UserError("a memory with int8 entries or corrections cannot be updated: build it again")
    caches = encode_chunks(method, model, calibration.context)
    store = collected(method, model, caches, calibration)
    layers = {}
    for index, old in memory.layers.items():
        builder = LayerBuilder(method, store, index, old.grouping, 0, calibration.seed)
        builder.whiten = old.whiten
        layers[index] = _layer(method, old, builder)
    manifest = {**memory.manifest, "context": context.key, "seen": max(memory.seen, caches[-1].seen)}
    return StateMemory(layers, memory.rows, manifest)


def _layer(method: Any, old: LayerMemory, builder: LayerBuilder) -> LayerMemory:
    books, k, width = old.keys.shape
    heads, dv = old.a.shape[-2:]
    extras = {"q": (width,)}
    sums = [
        StateAccumulator(k, heads, dv, old.log_z.dtype, method.aggregate, extras) for _ in range(books)
    ]
    for block in builder.store.blocks(builder.layer, builder.block):
        keys = builder.keys(block["q"])
        a, s = builder.grouping.split(block["a"]), builder.grouping.split(block["s"])
        for book, acc in enumerate(sums):
            index = kmeans.assign(keys[book], old.keys[book].to(keys.dtype), "cosine", method.backend)
            acc.add(index, s[book], a[book], q=keys[book])
    parts = [_entries(method, old, book, acc) for book, acc in enumerate(sums)]
    return LayerMemory(old.grouping, {**old.tensors, **{n: torch.stack([p[n] for p in parts]) for n in parts[0]}})


def _entries(method: Any, old: LayerMemory, book: int, acc: StateAccumulator) -> dict[str, torch.Tensor]:
    """Join the old entries of one codebook with the states of the new samples."""
    new: States = acc.finish()
    before, after = old.count[book], old.count[book] + new.counts
    share = (new.counts / after.clamp(min=1)).to(old.log_z.dtype)[:, None]  # of the new samples
    centroid = old.keys[book] * old.norm[book][:, None].to(old.keys.dtype)
    centroid = torch.lerp(centroid.to(share.dtype), acc.mean("q"), share)
    a, s, fresh = old.a[book].to(new.a.dtype), old.log_z[book], (new.counts > 0)[:, None]
    if method.chunk_merge == "sum":
        joined, mass = merge_states(a, s, new.a, new.log_z)
    elif method.aggregate == "eq5":
        old_n, new_n = (n.to(s.dtype)[:, None].log() for n in (before, new.counts))
        joined, mass = merge_states(a, s + old_n, new.a, new.log_z + new_n)
        mass = mass - after.to(s.dtype)[:, None].log()
    else:
        joined, mass = torch.lerp(a, new.a, share[..., None]), torch.lerp(s, new.log_z, share)
    return {
        "keys": F.normalize(centroid, dim=-1).to(old.keys.dtype),
        "norm": centroid.norm(dim=-1),
        "a": torch.where(fresh[..., None], joined, a).to(old.a.dtype),
        "log_z": torch.where(fresh, mass, s),
        "count": after,
    }
