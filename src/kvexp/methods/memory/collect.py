"""Collection (ASM, section 5.1 of the method): attention states of trace tokens over the prefix alone.

The prefix is encoded once. Traces run as queries on forks of it; in every full-attention layer an observer
sees, before the merge, the state (a, s) over the prefix, and writes it with the key-space query to a store.
With several chunks (`chunks` > 1) the traces run over each chunk: `mean` pools the samples of all chunks (the
paper's text), `sum` merges the states that the same token has over the chunks, and averages its queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvexp.attention.function import Call
from kvexp.attention.rope import attention_scaling, rotate
from kvexp.cache.dense import DenseLayer, State
from kvexp.cache.kv_cache import KVCache, empty_cache, prefill
from kvexp.cache.shared import SharedRows
from kvexp.methods.memory.lookup import key_space
from kvexp.stats.samples import SampleStore
from kvexp_kernels.merge_states.reference import merge_many


def encode_chunks(method: Any, model: Any, context: Any) -> list[KVCache]:
    """Encode the context once, or in `method.chunks` parts of whole demonstrations, each behind the header."""
    if method.chunks == 1:
        parts = [list(getattr(context, "ids", context))]
    else:
        chunks, count = context.chunks, method.chunks
        bounds = [round(i * len(chunks) / count) for i in range(count + 1)]
        parts = [
            [*context.header, *(t for chunk in chunks[a:b] for t in chunk)]
            for a, b in zip(bounds, bounds[1:], strict=False)
        ]
    with method.attach(model):
        return [prefill(model, part, empty_cache(model)) for part in parts]


def forward(model: Any, cache: KVCache, traces: Sequence[Sequence[int]]) -> torch.Tensor:
    """Run traces behind the cache, padded on the right; return which tokens are real, [B, T] bool."""
    device = model.get_input_embeddings().weight.device
    width = max(len(t) for t in traces)
    ids = torch.zeros(len(traces), width, dtype=torch.long, device=device)
    real = torch.zeros_like(ids, dtype=torch.bool)
    for row, trace in enumerate(traces):
        ids[row, : len(trace)] = torch.tensor(list(trace), device=device)
        real[row, : len(trace)] = True
    seen = cache.seen
    columns = torch.cat([real.new_ones(len(traces), seen), real], dim=1)
    positions = torch.arange(seen, seen + width, device=device).expand(len(traces), -1)
    model(ids, cache=cache, attention_mask=columns, position_ids=positions, logits_to_keep=1)
    return real


class Collector:
    """Turns batches of traces into samples of every full-attention layer."""

    def __init__(self, method: Any, model: Any, caches: list[KVCache], store: SampleStore) -> None:
        self.method, self.model, self.caches, self.store = method, model, caches, store
        self.found: dict[int, list[dict[str, torch.Tensor]]] = {}
        self.real: torch.Tensor | None = None

    def __call__(self, traces: Sequence[Sequence[int]]) -> None:
        """Collect one batch (needs the attached model)."""
        with self.method.attach(self.model):
            for cache in self.caches:
                fork = cache.fork()
                fork.observe(self.observe)
                real = forward(self.model, fork, traces)
                for states in self.found.values():
                    states[-1] = {name: x.transpose(1, 2)[real] for name, x in states[-1].items()}
                if self.method.chunk_merge == "mean":
                    self._write()
            self._write()

    def observe(self, layer: DenseLayer, call: Call, before: list[State], local: State) -> None:
        """Keep one layer's query and prefix state: tensors [B, Hq, T, ...]."""
        method = self.method
        a, s = before[0]
        index = call.layer_index
        query = key_space(call.query_pre, call.query, method.key, self.model, index, method.unified_position)
        sample = {"q": query, "a": a, "s": s}
        if method.slope:
            sample["slope"] = self._slope(layer, call)
        self.found.setdefault(index, []).append(sample)

    def _slope(self, layer: DenseLayer, call: Call) -> torch.Tensor:
        """Return d log Z / d q for the key-space query: the mean attended key, turned into the query's frame."""
        rows = layer.sources[0]
        assert isinstance(rows, SharedRows)
        keys, _ = rows.expanded(call)
        mean, _ = rows.attended(call, layer, keys, keys)
        method, index = self.method, call.layer_index
        if method.key == "rope_actual":
            return mean * call.scale
        back = method.unified_position if method.key == "rope_unified" else 0
        return rotate(self.model, mean, back - layer.q_positions[0], index) * (
            call.scale * attention_scaling(self.model, index)
        )

    def _write(self) -> None:
        for index, states in self.found.items():
            merged = states[0]
            if len(states) > 1:
                a, s = merge_many(torch.stack([x["a"] for x in states]), torch.stack([x["s"] for x in states]))
                means = {n: torch.stack([x[n] for x in states]).mean(0) for n in merged if n not in "as"}
                merged = {**means, "a": a, "s": s}
            self.store.append(index, **{name: x.cpu() for name, x in merged.items()})
        self.found.clear()
