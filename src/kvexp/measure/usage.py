"""What a method held: rows, bytes and counters of an encoded context, beside those of the whole context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvexp.attention.sliced import slices
from kvexp.cache.kv_cache import KVCache, row_bytes

OF_HEADS = ("bytes_peak", "bytes_peak_prompt", "evicted")  # what grows with the heads that a process holds


def cache_usage(model: Any, cache: KVCache, context_tokens: int, nominal: int) -> dict[str, Any]:
    """Return the `cache` section of a record, for one sequence.

    Entries are rows or memory entries per KV head, over full-attention layers: the context's alone, since a
    query's own rows are the same for every method. A method that also evicts while decoding is counted with
    everything that it held, over all its steps, before rows leave; what was held while the prompt was read
    is told apart (`entries_peak_prompt`, `bytes_peak_prompt`). `kv_token_equivalents` is what these layers
    hold in bytes, in units of one token's rows. Sliding layers hold their window under every method.
    Of a model that several processes hold together, each with as many heads, it is what all of them hold.
    """
    entries, row, parts = cache.entries(), row_bytes(model), slices(model)
    window = sum(layer.nbytes() for layer in cache.layers if layer.window is not None) // cache.batch
    window *= parts
    usage: dict[str, Any] = {
        "context_tokens": context_tokens,
        "entries_nominal": nominal,
        "entries_peak": max(entries, default=0),
        "entries_mean": sum(entries) / max(1, len(entries)),
        "bytes_peak": cache.sequence_bytes(),
        "bytes_full": context_tokens * row + window,
    }
    if cache.evictor is not None:
        usage |= cache.evictor.usage()
    usage |= {name: int(value) for name, value in cache.counters.items()}
    usage |= {name: usage[name] * parts for name in OF_HEADS if name in usage}
    usage["kv_token_equivalents"] = round((usage["bytes_peak"] - window) / row, 1) if row else 0.0
    return usage


def total_usage(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one `cache` section for the caches of several contexts: the largest of each peak.

    `context_tokens` and `bytes_full` are of the longest context, means are over caches, counters are the
    last ones, which go on from cache to cache.
    """
    total = dict(max(parts, key=lambda part: part["context_tokens"]))
    for name in ("entries_peak", "bytes_peak", "kv_token_equivalents"):
        total[name] = max(part[name] for part in parts)
    for name in ("entries_peak_prompt", "bytes_peak_prompt"):
        if name in total:
            total[name] = max(part[name] for part in parts)
    total["entries_mean"] = sum(part["entries_mean"] for part in parts) / len(parts)
    known = {*total, "storage"}
    total |= {name: value for name, value in parts[-1].items() if name not in known or name in COUNTERS}
    return total | shares(total)


def added(usage: dict[str, Any], others: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """Return a `cache` section with the counters of other processes added to its own."""
    if not others:
        return usage
    total = dict(usage)
    for counters in others:
        for name, value in counters.items():
            total[name] = total.get(name, 0) + int(value)
    return total | shares(total)


def shares(counters: Mapping[str, Any]) -> dict[str, float]:
    """Return what reuse really found and refreshed, over all contexts, as shares of the tokens of units.

    `recomputed_share`: tokens times layers that were computed; `union_share`: tokens that were chosen,
    whatever they were chosen for; `hit_rate`: tokens that the store held. Nothing where no token could be
    reused.
    """
    if not (counters.get("reusable") and counters.get("unit_tokens")):
        return {}
    return {
        "recomputed_share": round(counters["recomputed"] / counters["reusable"], 4),
        "union_share": round(counters["union"] / counters["unit_tokens"], 4),
        "hit_rate": round(counters.get("found", 0) / counters["unit_tokens"], 4),
    }


COUNTERS = (
    *("evicted", "quantised", "looked_up", "reused", "recomputed", "reusable", "unit_tokens", "union"),
    "prompt_competed",
    *("check_rows", "question_rows", "moved_bytes", "store_hits", "store_misses", "found"),
)
