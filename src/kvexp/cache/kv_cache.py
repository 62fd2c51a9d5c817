"""The cache that kvexp hands to transformers: one layer of ours for each decoder layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvexp.attention.families import layer_windows, of
from kvexp.attention.options import options_of
from kvexp.cache.dense import DenseLayer
from kvexp.cache.source import Observer


class KVCache(Cache):
    """A transformers cache made of kvexp layers; `fork` gives a cheap copy for one more query.

    `counters` says what the method really did (evicted, looked_up, reused, recomputed, ...), shared by forks.
    """

    layers: list[DenseLayer]  # type: ignore[assignment]

    def __init__(
        self,
        layers: Sequence[DenseLayer],
        counters: dict[str, int] | None = None,
        evictor: Any = None,
        columns: torch.Tensor | None = None,
    ) -> None:
        super().__init__(layers=[*layers])
        self.counters: dict[str, int] = {} if counters is None else counters
        self.columns = columns  # which tokens seen are real, [B, seen] bool; None: all
        self.evictor = evictor  # decides which rows stay; None where all do
        if evictor is not None:
            evictor.bind(self)
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
        evictor = None if self.evictor is None else self.evictor.fork()
        return KVCache([layer.fork() for layer in self.layers], self.counters, evictor, self.columns)

    @property
    def batch(self) -> int:
        """Sequences that the cache tells apart; 1 serves any batch."""
        return max(layer.batch for layer in self.layers)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices` of the batch, which may repeat; what serves any batch stays."""
        super().batch_select_indices(indices)
        self._follow(indices)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Follow the beams."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._follow(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        batch = self.batch
        super().batch_repeat_interleave(repeats)
        self._follow(torch.arange(batch).repeat_interleave(repeats))

    def _follow(self, indices: torch.Tensor) -> None:
        if self.columns is not None:
            self.columns = self.columns.index_select(0, indices.to(self.columns.device))
        if self.evictor is not None:
            self.evictor.select(indices)

    def observe(self, observer: Observer | None) -> None:
        """Let `observer` see the attention states of every full-attention layer (None: nobody)."""
        for layer in self.layers:
            if layer.window is None:
                layer.observer = observer

    def nbytes(self) -> int:
        """Bytes of all rows and entries, each tensor counted once however many layers share it."""
        held = {t.data_ptr(): tensor_bytes(t) for layer in self.layers for t in layer.tensors()}
        return sum(held.values())

    def sequence_bytes(self) -> int:
        """Bytes for each sequence: what a batch holds apart is divided by it, what serves any is not."""
        held = {
            t.data_ptr(): tensor_bytes(t) / batch
            for layer in self.layers
            for batch, tensors in layer.tensors_by_batch()
            for t in tensors
        }
        return round(sum(held.values()))

    def entries(self) -> list[int]:
        """Rows and entries per KV head, one number a layer, full-attention layers only."""
        return [layer.entries() for layer in self.layers if layer.window is None]


def empty_cache(model: Any) -> KVCache:
    """Return a cache of dense layers for `model`, nothing seen yet."""
    backend = options_of(model).backend
    windows = layer_windows(model.config.get_text_config())
    return KVCache([DenseLayer(window=window, backend=backend) for window in windows])


@torch.no_grad()
def prefill(
    model: Any,
    ids: Sequence[int] | Sequence[Sequence[int]],
    cache: KVCache,
    before_chunk: Callable[[bool], None] | None = None,
) -> KVCache:
    """Run `ids` through `model` in chunks so that `cache` has seen them; needs an attached model.

    `ids` are one text, or several, which are padded on the left (in an empty cache only). `before_chunk` is
    told before each chunk whether it is the last one.
    """
    device = model.get_input_embeddings().weight.device
    texts = [ids] if not ids or isinstance(ids[0], int) else ids
    width = max(len(text) for text in texts)  # type: ignore[arg-type]
    tokens = torch.zeros(len(texts), width, dtype=torch.long, device=device)
    real = torch.zeros_like(tokens, dtype=torch.bool)
    for row, text in enumerate(texts):
        start = width - len(text)  # type: ignore[arg-type]
        tokens[row, start:] = torch.tensor(list(text), device=device)  # type: ignore[arg-type]
        real[row, start:] = True
    padded = not bool(real.all())
    if padded and cache.seen:
        raise ValueError("texts of different lengths can be encoded in an empty cache only")
    seen, chunk = cache.seen, options_of(model).prefill_chunk
    positions = seen + (real.cumsum(1) - 1).clamp(min=0)
    for at in range(0, width, chunk):
        part = slice(at, at + chunk)
        if before_chunk is not None:
            before_chunk(at + chunk >= width)
        model(
            tokens[:, part],
            cache=cache,
            attention_mask=real[:, : at + chunk] if padded else None,
            position_ids=positions[:, part],
            logits_to_keep=1,
        )
    cache.columns = real if padded else cache.columns
    return cache


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements, those that an expanded view repeats counted once."""
    sizes = (n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or n == 0)
    return math.prod(sizes) * tensor.element_size()


def row_bytes(model: Any) -> int:
    """Bytes that one token's rows take in all full-attention layers of a dense cache (MLA: its latents)."""
    config = model.config.get_text_config()
    family = of(config)
    if family.latent:
        width = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        width = 2 * config.num_key_value_heads * family.query_dim(config)
    return width * layer_windows(config).count(None) * model.dtype.itemsize
