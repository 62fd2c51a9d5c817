"""Reads what tokens that repeat a part of a context see of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from kvexp.attention.function import Call
from kvexp.attention.options import options_of
from kvexp.attention.sinks import softmax
from kvexp.cache.evicting import EvictingLayer
from kvexp.cache.kv_cache import KVCache
from kvexp.cache.rows import KeptRows, expanded, over_heads
from kvexp.methods.eviction.selection import over_group
from kvexp.methods.eviction.written import state_norms, written

BLOCK = 256  # queries whose scores stand in memory at once


class Reader:
    """The evictor of forks on which chunks are repeated: nothing leaves, weights are read and kept.

    `plus`: a weight counts by what its row writes into the state of the token that reads it, see `KVzip`.
    """

    wants_lse = False
    wants_rows = False

    def __init__(self, cache: KVCache, group: str, plus: bool = False) -> None:
        self.group, self.plus = group, plus
        self.layers = evicting(cache)
        self.norms: dict[int, torch.Tensor] | None = None  # of the states of the forward that runs
        self.most_rows = self.most_bytes = 0  # that were held
        self.scores: dict[int, torch.Tensor] = {}
        for layer in self.layers:
            dtype = torch.float64 if layer.keys.dtype == torch.float64 else torch.float32
            self.scores[layer.index] = torch.zeros(
                layer.keys.shape[:3], dtype=dtype, device=layer.keys.device
            )

    def repeat(
        self, model: Any, cache: KVCache, texts: list[list[int]], columns: Sequence[Sequence[int]]
    ) -> None:
        """Feed `texts` [B] behind a fork; score the rows that stand at `columns` [B] of the cache."""
        device = model.get_input_embeddings().weight.device
        tokens, real = padded(texts, device)
        self.columns, self.counted = padded(columns, device)
        before = cache.columns
        before = real.new_ones(len(texts), cache.seen) if before is None else before.to(device)
        seen_columns = torch.cat([before, real], dim=1)
        positions = (seen_columns.cumsum(1) - 1).clamp(min=0)
        pads = not bool(seen_columns.all())
        fork = cache.fork()
        layers = evicting(fork)
        for layer in layers:
            layer.evictor = self
        chunk = options_of(model).prefill_chunk
        for at in range(0, tokens.shape[1], chunk):
            start, end = fork.seen, fork.seen + tokens[:, at : at + chunk].shape[1]
            with state_norms(model) if self.plus else nullcontext() as self.norms:
                model(
                    tokens[:, at : at + chunk],
                    cache=fork,
                    attention_mask=seen_columns[:, :end] if pads else None,
                    position_ids=positions[:, start:end],
                    logits_to_keep=1,
                )
            self.most_rows = max(self.most_rows, *(layer.entries() for layer in layers))
            self.most_bytes = max(self.most_bytes, fork.sequence_bytes())
            cache.evictor.meter.hold(self.most_rows, prompt=True)
            cache.evictor.meter.weigh(self.most_bytes, prompt=True)

    def after(self, layer: EvictingLayer, call: Call) -> None:
        """Note the largest weights that the queries of this forward give to the rows being repeated."""
        [context] = layer.sources
        assert isinstance(context, KeptRows)
        columns, counted = (x.to(layer.keys.device) for x in (self.columns, self.counted))
        heads, width = layer.keys.shape[1], columns.shape[1]
        keys, values = (
            torch.cat([old.gather(2, _by_head(columns, old)), own], dim=2)
            for old, own in ((context.rows.keys, layer.keys), (context.rows.values, layer.values))
        )
        keys, values = expanded(call.module, keys, values)
        visible = _visible(layer, call, counted)
        counts = self._counts(layer, call)
        best = self.scores[layer.index].new_zeros(call.query.shape[0], call.query.shape[1], width)
        for at in range(0, call.query.shape[2], BLOCK):
            part = slice(at, at + BLOCK)
            seen = over_heads(visible[:, :, part], call.query.shape[1])
            weights = _weights(call.query[:, :, part], keys, call.scale, seen, call.sinks)[..., :width]
            if counts is not None:
                weights = weights * counts[:, None, part, None]
            best = torch.maximum(best, weights.amax(2))
        if self.plus:
            best = best * written(call.module, values[:, :, :width], call.query.shape[1])
        best = over_group(best, heads, self.group)
        # Entries that only fill a shorter list up weigh nothing, and so change no score of theirs.
        self.scores[layer.index].scatter_reduce_(2, columns[:, None].expand(-1, heads, -1), best, "amax")

    def _counts(self, layer: EvictingLayer, call: Call) -> torch.Tensor | None:
        """How much the weights of each query of this forward count, [B, T]; 0 for pads, None: all as much."""
        real = call.padding.at(layer.q_slots)
        if self.norms is None:
            return real
        norms = self.norms[call.layer_index]
        share = 1 / norms.clamp(min=torch.finfo(norms.dtype).tiny)
        return share if real is None else share * real


def _weights(
    query: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    visible: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax weights [B, Hq, T, S] of rotated queries over keys [B, Hk, S, D], float32 at least.

    Learned `sinks` [Hq] take their share.
    """
    dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
    batch, heads, length, width = query.shape
    folded = query.to(dtype).reshape(batch, keys.shape[1], -1, width)
    scores = folded @ keys.to(dtype).transpose(-1, -2) * scale
    scores = scores.view(batch, heads, length, -1).masked_fill(~visible, -torch.inf)
    return softmax(scores, sinks)


def _visible(layer: EvictingLayer, call: Call, counted: torch.Tensor) -> torch.Tensor:
    """What each query sees of the repeated rows and of the repetition itself, [B, 1 or H, T, m + R]."""
    batch, length = call.query.shape[0], call.query.shape[2]
    own = layer.visible(call)
    if own is None:
        own = counted.new_ones(1, 1, length, layer.rows)
    own = own.expand(batch, -1, -1, -1)
    return torch.cat([counted[:, None, None].expand(-1, own.shape[1], length, -1), own], dim=-1)


def evicting(cache: KVCache) -> list[EvictingLayer]:
    """Return the layers of a cache whose rows may leave."""
    return [layer for layer in cache.layers if isinstance(layer, EvictingLayer)]


def padded(lists: Sequence[Sequence[int]], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return lists of numbers side by side, padded on the left with 0, and which entries are real."""
    width = max(map(len, lists))
    numbers = torch.zeros(len(lists), width, dtype=torch.long, device=device)
    real = torch.zeros_like(numbers, dtype=torch.bool)
    for row, some in enumerate(lists):
        start = width - len(some)
        numbers[row, start:] = torch.tensor(list(some), dtype=torch.long, device=device)
        real[row, start:] = True
    return numbers, real


def _by_head(columns: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return columns[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3])
