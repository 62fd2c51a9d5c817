"""The two ends of ASM: `prepare` builds a memory, `virtual_cache` lets a model run on it."""

from __future__ import annotations

import logging
from typing import Any

import torch

from kvexp.attention import families
from kvexp.attention.options import options_of
from kvexp.cache.dense import DenseLayer
from kvexp.cache.kv_cache import KVCache
from kvexp.cache.virtual import Virtual
from kvexp.errors import UserError
from kvexp.methods.memory.build import LayerBuilder, stored
from kvexp.methods.memory.collect import Collector, encode_chunks
from kvexp.methods.memory.grouping import Grouping
from kvexp.methods.memory.lookup import LayerLookup
from kvexp.methods.memory.states import StateMemory, refuse_mismatch
from kvexp.stats.samples import SampleStore

log = logging.getLogger(__name__)
FEW_TOKENS = 4  # trace tokens per entry under which a memory of this size is not worth its name


def dims(model: Any) -> tuple[int, int, int, int]:
    """Return (Hq, Hkv, D, Dv) as attention sees them: with MLA every head has its own keys."""
    config = model.config.get_text_config()
    family = families.of(config)
    heads = config.num_attention_heads
    if family.latent:
        return heads, heads, family.query_dim(config), config.v_head_dim
    return heads, config.num_key_value_heads, family.query_dim(config), family.query_dim(config)


def prepare(method: Any, model: Any, calibration: Any, budget: Any) -> StateMemory:
    """Build the memory of `calibration.context` from `calibration.traces` (ASM, sections 5.1 to 5.5)."""
    families.require_full_layer(model.config.get_text_config())
    q_heads, kv_heads, d, dv = dims(model)
    grouping = Grouping.of(method.layout, q_heads, kv_heads, method.heads_per_entry)
    k = grouping.entries(budget.limit(1 << 40), method.match, d, dv)
    tokens = sum(len(t) for t in calibration.traces) * (method.chunks if method.chunk_merge == "mean" else 1)
    if tokens < FEW_TOKENS * k:
        log.warning(
            "%d trace tokens for %d entries is %.1f each, below %d: raise calibration.n or lower the budget",
            tokens, k, tokens / k, FEW_TOKENS,
        )  # fmt: skip
    caches = encode_chunks(method, model, calibration.context)
    layers = [i for i, layer in enumerate(caches[-1].layers) if layer.window is None]
    store = collected(method, model, caches, calibration)
    memory = StateMemory({}, _window_rows(caches[-1]), {"seen": caches[-1].seen, "trace_tokens": tokens})
    for layer in calibration.track(layers, "clustering layers", len(layers)):
        built = LayerBuilder(method, store, layer, grouping, k, calibration.seed).build()
        memory.layers[layer] = stored(built, model.dtype, method.entries == "int8")
    memory.manifest |= {"entries": k, "context": calibration.context.key, **_costs(memory, budget, k, d, dv)}
    return memory


def collected(method: Any, model: Any, caches: list[KVCache], calibration: Any) -> SampleStore:
    """Run the calibration's traces over encoded chunks, unless kept samples lie ready; return all ranks' samples."""
    if calibration.collected:
        return SampleStore.merge(calibration.shards())
    q_heads, _, d, dv = dims(model)
    layers = [i for i, layer in enumerate(caches[-1].layers) if layer.window is None]
    fields = {"q": (q_heads, d), "a": (q_heads, dv), "s": (q_heads,)}
    if method.slope:
        fields["slope"] = (q_heads, d)
    dtype = torch.float64 if model.dtype == torch.float64 else getattr(torch, method.samples)
    store = SampleStore.create(calibration.folder, layers, fields, dtype)
    calibration.run(Collector(method, model, caches, store), calibration.traces, "collecting states")
    store.close()
    return SampleStore.merge(calibration.shards())


def _window_rows(cache: KVCache) -> dict[int, dict[str, torch.Tensor]]:
    """The rows that sliding-window layers keep: their window reaches into the prefix, and stays as it is."""
    rows = {}
    for index, layer in enumerate(cache.layers):
        if layer.window is not None:
            first = max(0, layer.rows - (layer.window - 1))
            rows[index] = {
                "keys": layer.keys[:, :, first:].clone(),
                "values": layer.values[:, :, first:].clone(),
                "slots": layer.slots[first:].clone(),
                "positions": layer.positions[:, first:].clone(),
            }
    return rows


def _costs(memory: StateMemory, budget: Any, k: int, d: int, dv: int) -> dict[str, Any]:
    """What K entries cost in KV rows per KV head, three ways (numbers, not bytes)."""
    grouping = next(iter(memory.layers.values())).grouping
    m, row = grouping.per_entry, d + dv
    return {
        "cost_entries": k,
        "cost_traffic_rows": round(k * m * d / row, 1),
        "cost_storage_rows": round(k * m * (row + 1) / row, 1),
    }


def virtual_cache(method: Any, model: Any, context: Any, memory: StateMemory) -> KVCache:
    """Return a cache that has seen the prefix: full layers look up, sliding layers keep their last rows."""
    key = getattr(context, "key", None)
    if key is not None:
        refuse_mismatch(memory.manifest, {"context": key}, "this run")
    counters: dict[str, int] = {}
    layers = []
    for index, window in enumerate(families.layer_windows(model.config.get_text_config())):
        if window is not None:
            layers.append(_sliding(memory.rows[index], memory.seen, window))
            continue
        if index not in memory.layers:
            raise UserError(f"the memory has no entries for layer {index}: it was built for another model")
        lookup = LayerLookup(memory.layers[index], model, index, method, counters)
        layers.append(DenseLayer((Virtual(lookup, counters),), memory.seen, backend=options_of(model).backend))
    return KVCache(layers, counters)


def _sliding(rows: dict[str, torch.Tensor], seen: int, window: int) -> DenseLayer:
    layer = DenseLayer((), seen, window)
    layer.lazy_initialization(rows["keys"], rows["values"])
    layer.keys, layer.values, layer.rows = rows["keys"], rows["values"], rows["keys"].shape[2]
    layer.slots, layer.positions = rows["slots"], rows["positions"]
    return layer
