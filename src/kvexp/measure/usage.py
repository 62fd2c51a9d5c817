"""What a method held: rows, bytes and counters of an encoded context, beside those of the whole context."""

from __future__ import annotations

from typing import Any

from kvexp.cache.kv_cache import KVCache, row_bytes


def cache_usage(model: Any, cache: KVCache, context_tokens: int, nominal: int) -> dict[str, Any]:
    """Return the `cache` section of a record.

    Entries are rows or memory entries per KV head, over full-attention layers: the context's alone, since a
    query's own rows are the same for every method. `kv_token_equivalents` is what these layers hold in bytes,
    in units of one token's rows. Sliding layers hold their window under every method.
    """
    entries, row = cache.entries(), row_bytes(model)
    window = sum(layer.nbytes() for layer in cache.layers if layer.window is not None)
    held = cache.nbytes()
    return {
        "context_tokens": context_tokens,
        "entries_nominal": nominal,
        "entries_peak": max(entries, default=0),
        "entries_mean": sum(entries) / max(1, len(entries)),
        "bytes_peak": held,
        "bytes_full": context_tokens * row + window,
        "kv_token_equivalents": round((held - window) / row, 1) if row else 0.0,
        **{name: int(value) for name, value in cache.counters.items()},
    }
