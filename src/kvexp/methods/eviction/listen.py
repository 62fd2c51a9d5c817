"""Hear every full-attention layer while texts run through a model once, forward only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvexp.attention.attach import attached
from kvexp.attention.families import layer_windows
from kvexp.attention.function import Call
from kvexp.attention.options import options_of
from kvexp.cache.dense import DenseLayer
from kvexp.cache.kv_cache import KVCache, prefill

Hear = Callable[["ListeningLayer", Call], None]


class ListeningLayer(DenseLayer):
    """A dense layer that tells `hear` of each attention call, queries before RoPE among it."""

    def __init__(self, hear: Hear, backend: str) -> None:
        super().__init__(backend=backend)
        self.hear = hear

    def attend(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tell, then attend."""
        self.hear(self, call)
        return super().attend(call)

    def real(self, call: Call) -> torch.Tensor:
        """Which of the new tokens are no pads, [B, T] bool."""
        real = call.padding.at(self.q_slots)
        if real is None:
            return torch.ones(call.query.shape[0], call.query.shape[2], dtype=torch.bool)
        return real


def listen(model: Any, texts: Sequence[Sequence[int]], hear: Hear) -> None:
    """Run `texts` (token ids) as one batch; `hear(layer, call)` sees each full-attention layer's calls.

    A long text comes in several calls, one for each part of a prompt that the model reads at a time. No cache
    is left at the end.
    """
    backend = options_of(model).backend
    layers = [
        ListeningLayer(hear, backend) if window is None else DenseLayer(window=window, backend=backend)
        for window in layer_windows(model.config.get_text_config())
    ]
    with attached(model, tap=True):
        prefill(model, texts, KVCache(layers))


def rows(x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return the vectors [H, n, D] of real tokens out of x [B, H, T, D], sequence by sequence."""
    return x.transpose(1, 2)[real.to(x.device)].transpose(0, 1)
