"""Collection (ASM, section 5.1 of the method): attention states of trace tokens over the prefix alone.

The prefix is encoded once. Traces run as queries on forks of it; in every full-attention layer an observer
sees, before the merge, the state (a, s) over the prefix, and writes it with the key-space query to a store.
With several chunks (`chunks` > 1) the traces run over each chunk: `mean` pools the samples of all chunks (the
paper's text), `sum` merges the states that the same token has over the chunks, and averages its queries.
Where a context has to be parted because the model was made for fewer tokens, `mean` runs each trace over one
part, so that there are as many passes as traces, which is how the paper counts them.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from kvexp.attention import families
from kvexp.attention.function import Call
from kvexp.attention.rope import rotate
from kvexp.cache.dense import DenseLayer
from kvexp.cache.kv_cache import KVCache, empty_cache, prefill
from kvexp.cache.shared import SharedRows
from kvexp.cache.source import State
from kvexp.errors import UserError
from kvexp.methods.memory.lookup import key_space
from kvexp.stats.samples import SampleStore
from kvexp_kernels.merge_states import merge_many

log = logging.getLogger(__name__)
QUERY_SHARE = 4  # a parted context leaves one part in so many of the model's context to queries and answers


def parts_needed(method: Any, model: Any, context: Any, longest: int) -> int:
    """Return in how many parts a context is encoded: `method.chunks`, or more where the model demands it.

    A part and the `longest` trace behind it fit into the context that the model was made for. Raises
    UserError where no whole chunks of the context do.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tokens = len(getattr(context, "ids", context))
    if limit is None or tokens + longest <= limit or _largest(context, method.chunks) + longest <= limit:
        return method.chunks
    room = limit - max(longest, limit // QUERY_SHARE)
    for count in range(method.chunks + 1, len(getattr(context, "chunks", ())) + 1):
        if (largest := _largest(context, count)) <= room:
            log.warning(
                "the context of %d tokens exceeds the %d that this model was made for: its memory is built in"
                " %d parts of at most %d tokens",
                tokens, limit, count, largest,
            )  # fmt: skip
            return count
    raise UserError(
        f"the context of {tokens} tokens exceeds the {limit} that this model was made for, and its chunks"
        " cannot be parted further: take a model with a longer context"
    )


def _largest(context: Any, count: int) -> int:
    return max(map(len, _parts(context, count)))


def encode_chunks(
    method: Any, model: Any, context: Any, count: int | None = None, end: int = 0
) -> list[KVCache]:
    """Encode the context once, or in `count` parts of whole demonstrations, each behind the header.

    All parts end at one position, that of the longest (or `end`, if that is later): what follows them, and
    with it a key that depends on its position, then stands at the same place behind each.
    """
    parts = _parts(context, count or method.chunks)
    end = max(end, *map(len, parts))
    caches = []
    with method.attach(model):
        for part in parts:
            cache = empty_cache(model)
            for layer in cache.layers:
                layer.seen = end - len(part)
            caches.append(prefill(model, part, cache))
    return caches


def _parts(context: Any, count: int) -> list[list[int]]:
    chunks = getattr(context, "chunks", ())
    if count == 1:
        parts = [list(getattr(context, "ids", context))]
    elif len(chunks) < count:
        raise UserError(
            f"method.chunks={count} is more than the {len(chunks)} demonstrations of this context: "
            f"use method.chunks={max(1, len(chunks))} or less"
        )
    else:
        bounds = _bounds([len(chunk) for chunk in chunks], count)
        parts = [[*context.header, *(t for chunk in chunks[a:b] for t in chunk)] for a, b in pairwise(bounds)]
    if not all(parts):
        raise UserError("an empty context leaves nothing to remember: give it a header or a demonstration")
    return parts


def _bounds(lengths: Sequence[int], count: int) -> list[int]:
    """Return where each of `count` runs of chunks begins and ends: about as many tokens each."""
    ends, bounds = [0, *accumulate(lengths)], [0]
    for number in range(1, count):
        wanted = number * ends[-1] / count
        nearest = min(range(len(ends)), key=lambda place: abs(ends[place] - wanted))
        bounds.append(min(max(nearest, bounds[-1] + 1), len(lengths) - (count - number)))
    return [*bounds, len(lengths)]


def forward(model: Any, cache: KVCache, traces: Sequence[Sequence[int]]) -> None:
    """Run a batch of traces behind the cache, padded on the right."""
    ids, real = _padded(traces, model.get_input_embeddings().weight.device)
    seen, width = cache.seen, ids.shape[1]
    columns = torch.cat([real.new_ones(len(ids), seen), real], dim=1)
    positions = torch.arange(seen, seen + width, device=ids.device).expand(len(ids), -1)
    model(ids, cache=cache, attention_mask=columns, position_ids=positions, logits_to_keep=1)


def _padded(traces: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids [B, T], padded on the right, and which of them are no pads."""
    ids = torch.zeros(len(traces), max(map(len, traces)), dtype=torch.long, device=device)
    real = torch.zeros_like(ids, dtype=torch.bool)
    for row, trace in enumerate(traces):
        ids[row, : len(trace)] = torch.tensor(list(trace), device=device)
        real[row, : len(trace)] = True
    return ids, real


class Collector:
    """Turns batches of traces into samples of every full-attention layer."""

    def __init__(self, method: Any, model: Any, caches: list[KVCache], store: SampleStore) -> None:
        self.method, self.model, self.caches, self.store = method, model, caches, store
        self.sums = method.chunk_merge == "sum" and len(caches) > 1
        self.shares = len(caches) > method.chunks and not self.sums  # each trace over one part
        self.found: dict[int, list[dict[str, torch.Tensor]]] = {}  # by layer, a sample for each chunk to sum
        self.real = torch.empty(0, dtype=torch.bool)  # [B, T], which tokens of the batch at work are no pads

    def close(self) -> None:
        """Finish the store."""
        self.store.close()

    def __call__(self, traces: Sequence[Sequence[int]]) -> None:
        """Collect one batch."""
        with self.method.attach(self.model):
            for number, cache in enumerate(self.caches):
                some = [trace for trace in traces if not self.shares or self._place(trace) == number]
                if not some:
                    continue
                _, self.real = _padded(some, self.model.get_input_embeddings().weight.device)
                fork = cache.fork()
                fork.observe(self.observe)
                forward(self.model, fork, some)
        for index, states in self.found.items():
            self.store.append(index, **_summed(states))
        self.found.clear()

    def _place(self, trace: Sequence[int]) -> int:
        """The part that a trace runs over: it depends on its tokens alone, not on batches or ranks."""
        return zlib.crc32(repr(tuple(trace)).encode()) % len(self.caches)

    def observe(self, layer: DenseLayer, call: Call, before: list[State], local: State) -> None:
        """Take one layer's queries and prefix states [B, H, T, ...] as samples [n, H, ...] of real tokens."""
        method, index = self.method, call.layer_index
        a, s = before[0]
        query = key_space(call.query_pre, call.query, method.key, self.model, index, method.unified_position)
        sample = {"q": query, "a": a, "s": s}
        if method.slope:
            sample["slope"] = self._slope(layer, call)
        sample = {name: x.transpose(1, 2)[self.real.to(x.device)] for name, x in sample.items()}
        if self.sums:
            self.found.setdefault(index, []).append(sample)
        else:
            self.store.append(index, **sample)

    def _slope(self, layer: DenseLayer, call: Call) -> torch.Tensor:
        """Return d log Z / d q for the key-space query: the mean attended key, in the query's frame."""
        rows = layer.sources[0]
        assert isinstance(rows, SharedRows)
        keys, _ = rows.expanded(call)
        mean, _ = rows.attended(call, layer, keys, keys)
        method, index = self.method, call.layer_index
        if method.key == "rope_actual":
            return mean * call.scale
        back = method.unified_position if method.key == "rope_unified" else 0
        mean = _as_tapped(mean, self.model.config.get_text_config())
        return call.scale * rotate(self.model, mean, back - layer.q_positions[0], index, scaled=True)


def _summed(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Join the samples that the same tokens have over several chunks: masses add up, queries are averaged.

    A slope is the derivative of log Z, so it is weighted by mass, as an output is.
    """
    stacked = {name: torch.stack([sample[name] for sample in states]) for name in states[0]}
    s = stacked["s"]
    a, total = merge_many(stacked["a"], s)
    joined = {"q": stacked["q"].mean(0), "a": a, "s": total}
    if "slope" in stacked:
        joined["slope"] = merge_many(stacked["slope"], s)[0]
    return joined


def _as_tapped(x: torch.Tensor, config: Any) -> torch.Tensor:
    """Order the numbers of a rotated key [..., D] as those of a tapped query: MLA's rotation moves them."""
    if families.of(config).query_pairing(config) != "adjacent_to_halves":
        return x
    still, turned = x.split([x.shape[-1] - config.qk_rope_head_dim, config.qk_rope_head_dim], dim=-1)
    return torch.cat([still, turned.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)], dim=-1)
