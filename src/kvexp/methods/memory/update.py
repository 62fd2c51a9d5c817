"""Add a chunk of prefix to a finished memory: the traces run over that chunk alone, entries keep their cells.

`chunk_merge=mean` pools the new samples with the old ones (the paper's reading: log Z is a mean over the
samples of all chunks), `sum` adds the new chunk's mass to each entry's, as exact composition of disjoint
chunks would. An entry that no new sample falls to stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from kvexp.errors import UserError
from kvexp.methods.memory.build import LayerBuilder
from kvexp.methods.memory.collect import encode_chunks
from kvexp.methods.memory.prepare import collected, refuse_other, window_rows
from kvexp.methods.memory.states import LayerMemory, StateMemory
from kvexp.stats import kmeans
from kvexp.stats.states import StateAccumulator, States
from kvexp_kernels.merge_states import merge_states


def update(method: Any, model: Any, memory: StateMemory, calibration: Any, context: Any) -> StateMemory:
    """Return a memory of `context`, made from `memory` and one pass over the new chunk.

    The chunk is `calibration.context`; sliding-window layers keep its last rows. Raises UserError for int8
    entries and corrections, which cannot be added to, and for a memory that was built otherwise.
    """
    refuse_other(memory.manifest, method, model)
    if method.entries == "int8" or method.residual or method.slope:
        raise UserError("a memory with int8 entries or corrections cannot be updated: build it again")
    caches = encode_chunks(method, model, calibration.context, count=1, end=memory.seen)
    seen = caches[0].seen
    if method.key == "rope_actual" and seen > memory.seen:
        raise UserError(
            f"this chunk of {seen} tokens is longer than the {memory.seen} that the memory has seen, and "
            "method.key=rope_actual depends on positions: add it in shorter chunks"
        )
    store = collected(method, model, caches, calibration)
    layers = {}
    for index, layer in memory.layers.items():
        old = LayerMemory(layer.grouping, {name: x.cpu() for name, x in layer.tensors.items()})
        builder = LayerBuilder(method, store, index, old.grouping, 0, calibration.seed)
        builder.whiten = old.whiten
        layers[index] = _layer(method, old, builder)
    manifest = {**memory.manifest, "context": context.key, "seen": seen}
    manifest["trace_tokens"] += sum(map(len, calibration.traces))
    return StateMemory(layers, window_rows(caches[0]), manifest).to(model.device)


def _layer(method: Any, old: LayerMemory, builder: LayerBuilder) -> LayerMemory:
    """Give every new sample to an entry, as the final pass of building did, and join the two."""
    books, k, width = old.keys.shape
    heads, dv = old.a.shape[-2:]
    kind = old.log_z.dtype
    sums = [StateAccumulator(k, heads, dv, kind, method.aggregate, {"q": (width,)}) for _ in range(books)]
    centroids = old.keys.to(old.norm.dtype) * old.norm[..., None]
    for block in builder.store.blocks(builder.layer, builder.block):
        keys = builder.keys(block["q"])
        a, s = builder.grouping.split(block["a"]), builder.grouping.split(block["s"])
        for book, acc in enumerate(sums):
            found = centroids[book].to(keys.dtype)
            index = kmeans.assign(keys[book], found, method.final, method.backend)
            acc.add(index, s[book], a[book], q=keys[book])
    parts = [_entries(method, old, book, acc, centroids[book]) for book, acc in enumerate(sums)]
    joined = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    return LayerMemory(old.grouping, {**old.tensors, **joined})


def _entries(
    method: Any, old: LayerMemory, book: int, acc: StateAccumulator, centroid: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Join the old entries of one codebook with the states of the new samples."""
    new: States = acc.finish()
    before, after = old.count[book], old.count[book] + new.counts
    share = (new.counts / after.clamp(min=1)).to(old.log_z.dtype)[:, None]  # of the new samples
    centroid = torch.lerp(centroid, acc.mean("q"), share)
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
