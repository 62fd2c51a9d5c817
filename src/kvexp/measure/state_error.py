"""How far a memory's attention is from the exact one, layer by layer, with exact queries.

Held-out queries run on a fork of the whole encoded context (teacher forced), so that every layer sees the
true query. An observer compares, for each token, the exact merged output with the one that the memory
would give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvexp.attention.function import Call
from kvexp.cache.dense import DenseLayer
from kvexp.cache.source import State
from kvexp.methods.memory.collect import encode_chunks, forward
from kvexp.methods.memory.lookup import LayerLookup
from kvexp_kernels.merge_states import merge_states


@dataclass
class LayerError:
    """Sums over tokens of one layer."""

    tokens: int = 0
    relative: float = 0.0  # |merged - exact| / |exact|, over the heads' joint output
    log_z: float = 0.0  # |log Z - log Z exact|, nats, mean over heads


class StateErrorMeter:
    """An observer for `KVCache.observe`: compares the prefix's exact states with a memory's."""

    def __init__(self, lookups: Mapping[int, LayerLookup]) -> None:
        self.lookups = lookups
        self.layers: dict[int, LayerError] = {index: LayerError() for index in lookups}

    def __call__(self, layer: DenseLayer, call: Call, before: list[State], local: State) -> None:
        """Observe one layer; padded tokens are left out, and so are layers without a memory."""
        if call.layer_index not in self.lookups:
            return
        index, lookup = call.layer_index, self.lookups[call.layer_index]
        query = lookup.key_queries(call, layer.q_positions)
        real = call.padding.at(layer.q_slots)
        every = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
        keep = every if real is None else real

        def kept(x: torch.Tensor) -> torch.Tensor:
            """The real tokens of [B, Hq, T, ...] as [n, Hq, ...]."""
            return x.transpose(1, 2)[keep]

        found_a, found_s = lookup.find(kept(query))
        exact = kept(merge_states(*before[0], *local)[0])
        ours, _ = merge_states(found_a.to(exact.dtype), found_s, kept(local[0]), kept(local[1]))
        error = self.layers[index]
        error.tokens += int(keep.sum())
        error.relative += float(
            ((ours - exact).flatten(1).norm(dim=-1) / exact.flatten(1).norm(dim=-1)).sum()
        )
        error.log_z += float((found_s - kept(before[0][1])).abs().mean(1).sum())

    def relative_errors(self) -> list[float]:
        """Mean relative error of each layer, in layer order."""
        return [error.relative / error.tokens for error in self.layers.values()]

    def log_z_errors(self) -> list[float]:
        """Mean absolute error of log Z of each layer, in nats."""
        return [error.log_z / error.tokens for error in self.layers.values()]


def errors_by_layer(
    method: Any, model: Any, context: Any, memory: Any, queries: Sequence[Sequence[int]], batch_size: int
) -> dict[str, list[float]]:
    """Return `relative_error` (of the merged output) and `log_z_error` (nats) of each layer with a memory.

    The context is encoded whole and the token ids of `queries` run behind it, so it has to fit the model.
    """
    [cache] = encode_chunks(method, model, context, count=1)
    meter = StateErrorMeter(
        {index: LayerLookup(layer, model, index, method, {}) for index, layer in memory.layers.items()}
    )
    with method.attach(model), torch.no_grad():
        for at in range(0, len(queries), batch_size):
            fork = cache.fork()
            fork.observe(meter)
            forward(model, fork, queries[at : at + batch_size])
    found = {"relative_error": meter.relative_errors(), "log_z_error": meter.log_z_errors()}
    return {name: [round(value, 4) for value in values] for name, values in found.items()}
