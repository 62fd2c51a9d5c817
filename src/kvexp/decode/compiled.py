"""A step of decoding in which everything between two attentions is compiled, and attention is not.

Norms, rotary embeddings, projections and their sums are one graph of fixed shapes, `torch.compile`d for one
token of each sequence. Attention is an opaque operation in it, which appends to the cache's layers and lets
them attend as ever: so one graph serves any method, context length, cache and fork of a model, and rows may
leave meanwhile. Sums are taken in another order than by transformers' modules: logits differ by rounding.
"""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from transformers.cache_utils import Cache

from kvexp.attention.attach import attention_modules
from kvexp.attention.families import of
from kvexp.attention.function import NAME, Padding, attention
from kvexp.cache.dense import DenseLayer
from kvexp.cache.kv_cache import KVCache

ATTRIBUTE = "kvexp_compiled"
_steps: WeakValueDictionary[int, CompiledSteps] = WeakValueDictionary()  # by the number that a graph holds
_numbers = itertools.count()


@torch.library.custom_op("kvexp::attend", mutates_args=())
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    number: int,
    index: int,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    return _steps[number].attend(index, query, key, value, scale, window, sinks)


@_attend.register_fake
def _(query, key, value, number, index, scale, window, sinks):
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


class _Outside(Cache):
    """Stands in for a cache while a graph is traced: rows go to the operation and not through the graph."""

    def __init__(self, layers: int, number: int) -> None:
        super().__init__(layers=[DenseLayer() for _ in range(layers)])  # without rows, for sizes alone
        self.number = number

    def update(self, key_states, value_states, layer_idx, *args, kwargs=None, **_):
        """Hand this object to the attention function."""
        kwargs["kvexp"] = self
        return key_states, value_states

    def later(self, module, query, key, value, scale, window, sinks):
        """Return attention's output [B, T, Hq, Dv] as an operation of the graph."""
        return torch.ops.kvexp.attend(query, key, value, self.number, module.layer_idx, scale, window, sinks)


class CompiledSteps:
    """Runs single tokens through `model` on any kvexp cache; made once for a model, by `compiled_steps`."""

    def __init__(self, model: Any, backend: str = "inductor") -> None:
        self.modules = attention_modules(model)
        self.number = next(_numbers)
        _steps[self.number] = self
        outside = _Outside(len(self.modules), self.number)

        def forward(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return model.forward(ids, cache=outside, position_ids=positions, logits_to_keep=1).logits

        self._forward = torch.compile(forward, fullgraph=True, backend=backend)
        self._cache: KVCache | None = None
        self._padding, self._positions = Padding(None), torch.empty(0)

    def __call__(
        self, cache: KVCache, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return logits [B, 1, V] after one more token of each sequence, ids and positions [B, 1]."""
        self._cache, self._padding, self._positions = cache, Padding(mask), positions
        try:
            with torch.no_grad():
                return self._forward(ids, positions)
        finally:
            self._cache = None

    def attend(self, index, query, key, value, scale, window, sinks):
        """Append the token's rows to a layer and return its attention [B, 1, Hq, Dv]."""
        assert self._cache is not None
        keywords = {"position_ids": self._positions}
        key, value = self._cache.update(key, value, index, kwargs=keywords)
        return attention(
            self.modules[index],
            query,
            key,
            value,
            self._padding,
            scaling=scale,
            sliding_window=window,
            s_aux=sinks,
            kvexp=keywords["kvexp"],
        )[0]


def compiled_steps(model: Any) -> CompiledSteps | None:
    """Return the compiled steps of an attached model; None where they cannot be, and steps stay as they are.

    That is where pre-RoPE queries are tapped, and where the cache holds latents that the model expands (MLA).
    """
    config = model.config.get_text_config()
    if model.config._attn_implementation != NAME:
        raise RuntimeError("compiled steps need an attached model: use `with method.attach(model)`")
    if of(config).latent or any(module._forward_pre_hooks for module in attention_modules(model)):
        return None
    if not hasattr(model, ATTRIBUTE):
        setattr(model, ATTRIBUTE, CompiledSteps(model))
    return getattr(model, ATTRIBUTE)
