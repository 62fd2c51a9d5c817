"""The two ends of ASM: `prepare` builds a memory, `virtual_cache` lets a model run on it."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import torch

from kvexp.attention import families
from kvexp.attention.attach import attention_modules
from kvexp.attention.devices import first_matrix, layer_devices
from kvexp.attention.options import options_of
from kvexp.cache.dense import DenseLayer
from kvexp.cache.kv_cache import KVCache, row_bytes
from kvexp.cache.virtual import Virtual
from kvexp.errors import UserError
from kvexp.methods.memory.build import LayerBuilder, stored
from kvexp.methods.memory.collect import Collector, encode_chunks, parts_needed
from kvexp.methods.memory.grouping import Grouping
from kvexp.methods.memory.lookup import LayerLookup
from kvexp.methods.memory.states import LayerMemory, StateMemory, refuse_mismatch
from kvexp.prompt import Context
from kvexp.stats.samples import SampleStore
from kvexp.stats.shares import Shares

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
    if not calibration.traces or not all(map(len, calibration.traces)):
        raise UserError(
            "a memory is learnt from traces, and there is none, or one without tokens: pass others"
        )
    q_heads, kv_heads, d, dv = dims(model)
    grouping = Grouping.of(method.layout, q_heads, kv_heads, method.heads_per_entry)
    longest = max(map(len, calibration.traces))
    count = parts_needed(method, model, calibration.context, longest)
    tokens = sum(len(t) for t in calibration.traces)
    if method.chunk_merge == "mean" and count == method.chunks:  # every trace runs over every chunk
        tokens *= count
    k = grouping.entries(budget.limit(1 << 40), method.match, d, dv, row_numbers(model))
    k = min(k, tokens * grouping.samples)
    if tokens < FEW_TOKENS * k:
        log.warning(
            "%d trace tokens for %d entries is %.1f each, below %d: raise calibration.n or lower the budget",
            tokens, k, tokens / k, FEW_TOKENS,
        )  # fmt: skip
    caches = encode_chunks(method, model, calibration.context, count)
    store = collected(method, model, caches, calibration)
    devices = layer_devices(model)

    def build(layer: int, shares: Shares) -> dict[str, torch.Tensor]:
        seed, device = calibration.seed, devices[layer]
        built = LayerBuilder(method, store, layer, grouping, k, seed, device, shares).build()
        return stored(built, model.dtype, method.entries == "int8").tensors

    made = calibration.spread(store.layers, build, "clustering layers")
    layers = {layer: LayerMemory(grouping, tensors) for layer, tensors in made.items()}
    manifest = {
        "context": calibration.context.key,
        "seen": caches[-1].seen,
        "parts": count,
        "trace_tokens": tokens,
        **identity(method, model),
        **_described(layers, row_numbers(model)),
    }
    return StateMemory(layers, window_rows(caches[-1]), manifest)


def identity(method: Any, model: Any) -> dict[str, Any]:
    """What a memory must have been built with to serve this method on this model."""
    config = model.config.get_text_config()
    sizes = "/".join(map(str, dims(model)))
    architecture = f"{config.model_type}, {config.num_hidden_layers} layers, heads {sizes}"
    return {
        "architecture": architecture,
        "dtype": str(model.dtype),
        "weights": weights(model),
        "knobs": method.stored_knobs(),
    }


@torch.no_grad()
def weights(model: Any) -> str:
    """Return 16 hex digits over a few rows of the embedding and of one projection of each layer."""
    projections = (first_matrix(module) for module in attention_modules(model))
    some = hashlib.sha256()
    for matrix in (model.get_input_embeddings().weight, *projections):
        if matrix is not None:
            rows = matrix[:: max(1, len(matrix) // 4)]
            some.update(rows.float().cpu().contiguous().numpy().tobytes())
    return some.hexdigest()[:16]


def refuse_other(manifest: dict[str, Any], method: Any, model: Any) -> None:
    """Raise UserError where a memory was built by another method, or on another model."""
    asked = identity(method, model)
    refuse_mismatch(manifest, asked)


def row_numbers(model: Any) -> int:
    """Numbers that an ordinary cache keeps for one token in one full-attention layer, all heads together."""
    full = families.layer_windows(model.config.get_text_config()).count(None)
    return row_bytes(model) // (full * model.dtype.itemsize)


def collected(method: Any, model: Any, caches: list[KVCache], calibration: Any) -> SampleStore:
    """Return the samples of the calibration's traces over encoded chunks."""
    layers, shapes, dtype = fields(method, model, caches[-1])

    def start(folder: Path) -> Collector:
        return Collector(method, model, caches, SampleStore.create(folder, layers, shapes, dtype))

    return SampleStore.merge(calibration.collect(start, calibration.traces, "collecting states"))


def fields(
    method: Any, model: Any, cache: KVCache
) -> tuple[list[int], dict[str, tuple[int, ...]], torch.dtype]:
    """Return the layers that are sampled, the shape of a sample's fields, and their dtype on disk."""
    q_heads, _, d, dv = dims(model)
    layers = [i for i, layer in enumerate(cache.layers) if layer.window is None]
    shapes: dict[str, tuple[int, ...]] = {"q": (q_heads, d), "a": (q_heads, dv), "s": (q_heads,)}
    if method.slope:
        shapes["slope"] = (q_heads, d)
    return layers, shapes, torch.float64 if model.dtype == torch.float64 else getattr(torch, method.samples)


def window_rows(cache: KVCache) -> dict[int, dict[str, torch.Tensor]]:
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


def _described(layers: dict[int, LayerMemory], row: int) -> dict[str, Any]:
    """Entries, their costs in KV rows per KV head (numbers, not bytes), and the spread of log Z in them."""
    memory = next(iter(layers.values()))
    k = max(layer.keys.shape[1] for layer in layers.values())
    traffic, storage = memory.grouping.entry_numbers(
        memory.keys.shape[-1] // memory.grouping.heads, memory.a.shape[-1]
    )
    counted = [(layer.std.mean(-1) * layer.count).sum() / layer.count.sum() for layer in layers.values()]
    return {
        "entries": k,
        "cost_entries": k,
        "cost_traffic_rows": round(k * traffic / row, 1),
        "cost_storage_rows": round(k * storage / row, 1),
        "log_z_std": round(float(torch.stack(counted).mean()), 4),  # of a sample's entry
    }


def virtual_cache(method: Any, model: Any, context: Any, memory: StateMemory) -> KVCache:
    """Return a cache that has seen the prefix: full layers look up, sliding layers keep their last rows."""
    refuse_other(memory.manifest, method, model)
    refuse_mismatch(memory.manifest, {"context": Context.of(context).key})
    counters: dict[str, int] = {}
    backend, layers = options_of(model).backend, []
    memory = memory.to(layer_devices(model))
    for index, window in enumerate(families.layer_windows(model.config.get_text_config())):
        if window is not None:
            layers.append(_sliding(memory.rows[index], memory.seen, window, backend))
            continue
        lookup = LayerLookup(memory.layers[index], model, index, method, counters)
        layers.append(DenseLayer((Virtual(lookup, counters, memory.seen),), memory.seen, backend=backend))
    return KVCache(layers, counters)


def _sliding(rows: dict[str, torch.Tensor], seen: int, window: int, backend: str) -> DenseLayer:
    layer = DenseLayer((), seen, window, backend)
    layer.lazy_initialization(rows["keys"], rows["values"])
    layer.keys, layer.values, layer.rows = rows["keys"], rows["values"], rows["keys"].shape[2]
    layer.slots, layer.positions, layer.clean = rows["slots"], rows["positions"], seen
    return layer
