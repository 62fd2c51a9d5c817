"""The cache that kvexp hands to transformers: one layer of ours for each decoder layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvexp.attention.families import layer_windows, of
from kvexp.attention.options import options_of
from kvexp.cache.dense import DenseLayer, Observer


class KVCache(Cache):
    """A transformers cache made of kvexp layers; `fork` gives a cheap copy for one more query.

    `counters` says what the method really did (evicted, looked_up, reused, recomputed, ...), shared by forks.
    """

    layers: list[DenseLayer]  # type: ignore[assignment]

    def __init__(self, layers: Sequence[DenseLayer], counters: dict[str, int] | None = None) -> None:
        super().__init__(layers=[*layers])
        self.counters: dict[str, int] = {} if counters is None else counters
        self._latest: DenseLayer | None = None  # the layer that was updated last

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows to a layer; RuntimeError where the layer before was appended to and never attended."""
        self._refuse_bypass()
        self._latest = self.layers[layer_idx]
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _refuse_bypass(self) -> None:
        """The model's own attention would read the own rows alone: no memory, no shared context, no sink."""
        if self._latest is not None and self._latest.pending:
            raise RuntimeError(
                "a forward over this kvexp cache ran without its method, or broke off: "
                "use `with method.attach(model)`, and a cache that was encoded anew"
            )

    @property
    def seen(self) -> int:
        """Tokens seen, the same in every layer."""
        return self.layers[0].get_seq_length()

    def fork(self) -> KVCache:
        """Return a cache that continues from here; neither copy sees what the other appends."""
        self._refuse_bypass()
        return KVCache([layer.fork() for layer in self.layers], self.counters)

    def observe(self, observer: Observer | None) -> None:
        """Let `observer` see the attention states of every full-attention layer (None: nobody)."""
        for layer in self.layers:
            if layer.window is None:
                layer.observer = observer

    def nbytes(self) -> int:
        """Bytes of all rows and entries, each tensor counted once however many layers share it."""
        held = {t.data_ptr(): t.numel() * t.element_size() for layer in self.layers for t in layer.tensors()}
        return sum(held.values())

    def entries(self) -> list[int]:
        """Rows and entries per KV head, one number a layer, full-attention layers only."""
        return [layer.entries() for layer in self.layers if layer.window is None]


def empty_cache(model: Any) -> KVCache:
    """Return a cache of dense layers for `model`, nothing seen yet."""
    backend = options_of(model).backend
    windows = layer_windows(model.config.get_text_config())
    return KVCache([DenseLayer(window=window, backend=backend) for window in windows])


@torch.no_grad()
def prefill(model: Any, ids: Sequence[int], cache: KVCache) -> KVCache:
    """Run `ids` through `model` in chunks so that `cache` has seen them; needs an attached model."""
    device = model.get_input_embeddings().weight.device
    start, chunk = cache.seen, options_of(model).prefill_chunk
    for at in range(0, len(ids), chunk):
        part = torch.tensor([list(ids[at : at + chunk])], device=device)
        positions = torch.arange(start + at, start + at + part.shape[1], device=device)[None]
        model(part, cache=cache, position_ids=positions, logits_to_keep=1)
    return cache


def row_bytes(model: Any) -> int:
    """Bytes that one token's rows take in all full-attention layers of a dense cache (MLA: its latents)."""
    config = model.config.get_text_config()
    family = of(config)
    if family.latent:
        width = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        width = 2 * config.num_key_value_heads * family.query_dim(config)
    return width * layer_windows(config).count(None) * model.dtype.itemsize
