"""Stand-ins for attention, masks and a cache layer that keep what transformers hands them."""

from __future__ import annotations

from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin

import helpers

NAME = "probe"


class Layer(CacheLayerMixin):
    """The least that a cache layer has to be."""

    def __init__(self, seen: int = 0) -> None:
        super().__init__()
        self.seen, self.given, self.returned, self.done = seen, [], [], []

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Never called from outside."""
        raise AssertionError("nobody but `update` calls this")

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep what is given and returned, and sign the keyword dict."""
        self.given.append(kwargs)
        self.seen += key_states.shape[-2]
        self.returned.append((key_states.clone(), value_states.clone()))
        if "kwargs" in kwargs:
            kwargs["kwargs"]["marker"] = self
        return self.returned[-1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """A mask of the whole sequence."""
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.seen

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def reorder_cache(self, beam_idx: Any) -> None:
        """Note the call."""
        self.done.append("reorder")

    def batch_select_indices(self, indices: Any) -> None:
        """Note the call."""
        self.done.append("select")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Note the call."""
        self.done.append("repeat")


class Probe:
    """Stands in for attention and masks, and keeps what they are given."""

    def __init__(self, family: str, mask: bool = True) -> None:
        self.model = helpers.model(family)
        self.calls: list[tuple[Any, ...]] = []
        self.keywords: list[dict[str, Any]] = []
        self.masks: list[dict[str, Any]] = []
        self.inputs: list[dict[str, Any]] = []
        self.name = NAME if mask else "probe_without_mask"

    def attention(self, module: Any, query: Any, key: Any, value: Any, mask: Any, **keywords: Any) -> Any:
        """The attention function: zeros."""
        self.calls.append((module, query, key, value, mask))
        self.keywords.append(keywords)
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    def mask(self, **keywords: Any) -> Any:
        """The mask function: this very object."""
        self.masks.append(keywords)
        return self

    def __enter__(self) -> Probe:
        AttentionInterface.register(self.name, self.attention)
        if self.name == NAME:
            AttentionMaskInterface.register(self.name, self.mask)
        self.before = self.model.config._attn_implementation
        self.model.set_attn_implementation(self.name)
        self.hook = self.model.register_forward_pre_hook(
            lambda module, args, kwargs: self.inputs.append(kwargs), with_kwargs=True
        )
        return self

    def __exit__(self, *error: object) -> None:
        self.hook.remove()
        self.model.set_attn_implementation(self.before)

    def cache(self, seen: int = 0) -> Cache:
        """A cache whose layers have seen so many tokens."""
        return Cache(layers=[Layer(seen) for _ in range(self.model.config.num_hidden_layers)])

    def modules(self) -> list[Any]:
        """The attention modules, in layer order."""
        return [layer.self_attn for layer in self.model.model.layers]
