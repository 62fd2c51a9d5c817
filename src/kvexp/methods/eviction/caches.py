"""The cache of an eviction method: evicting layers where a layer sees everything, dense ones elsewhere."""

from __future__ import annotations

from typing import Any

from kvexp.attention.families import layer_windows, require_full_layer
from kvexp.attention.options import options_of
from kvexp.cache.dense import DenseLayer
from kvexp.cache.evicting import EvictingLayer
from kvexp.cache.kv_cache import KVCache
from kvexp.methods.eviction.evictor import MethodEvictor


def evicting_cache(model: Any, evictor: MethodEvictor) -> KVCache:
    """Return an empty cache of `model` whose full-attention layers obey `evictor`.

    Sliding layers forget on their own and are left alone. Raises UserError when every layer slides.
    """
    config = model.config.get_text_config()
    require_full_layer(config)
    backend = options_of(model).backend
    layers = [
        EvictingLayer(index, backend=backend)
        if window is None
        else DenseLayer(window=window, backend=backend)
        for index, window in enumerate(layer_windows(config))
    ]
    return KVCache(layers, evictor=evictor)
