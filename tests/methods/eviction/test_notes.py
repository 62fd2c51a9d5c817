"""Methods that note something of each row at every step: batches, pads and forks change none of the notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import helpers
from kvexp.methods.eviction.base import EvictionMethod
from kvexp.methods.eviction.h2o import H2O
from kvexp.methods.eviction.lazyeviction import LazyEviction
from kvexp.methods.eviction.raas import RaaS
from kvexp.methods.eviction.snapkv import SnapKV
from kvexp.methods.eviction.vatp import VATP
from kvexp.tasks.batch import QueryBatch

QUERIES = [helpers.tokens(n, seed=50 + n) for n in (5, 9, 2)]
METHODS = [
    H2O(normalise="age", interval=2),
    H2O(window=6, recent_percent=None, recent=4),
    LazyEviction(interval=3, recent=4, alpha=0.05),
    RaaS(page=3, alpha=0.1),
    VATP(base=SnapKV(window=3), sinks=2),
]
Held = list[list[tuple[list[int], dict[str, torch.Tensor]]]]  # [layer][head]: positions, notes


def generated(model: Any, method: Any, cache: Any, queries: Sequence[Any], new: int) -> list[Held]:
    """What the caches hold of each query after `new` tokens."""
    caches: list[Any] = []
    with method.attach(model):
        batch = QueryBatch(model, cache, queries)
        fork = batch.cache.fork
        batch.cache.fork = lambda: caches.append(fork()) or caches[-1]  # type: ignore[func-returns-value,method-assign]
        batch.generate(new, lambda made: None)
    layers = [layer for layer in caches[0].layers if layer.window is None]
    found: list[Held] = []
    for b in range(len(queries)):
        found.append([])
        for layer in layers:
            layer.own()
            rows = layer.held()
            mask = rows.mask()[b]
            heads = range(mask.shape[0])
            notes = [{name: x[b, h][mask[h]] for name, x in rows.tracks.items()} for h in heads]
            found[b].append([(rows.positions[b, h][mask[h]].tolist(), notes[h]) for h in heads])
    return found


@pytest.mark.parametrize(("family", "budget"), [("qwen3", 17), ("qwen3", 52), ("deepseek_v3", 17)])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.id)
def test_together_as_alone(method: EvictionMethod, family: str, budget: int) -> None:
    """A context of 45 tokens: a budget of 17 is less than that, one of 52 is passed while decoding."""
    model = helpers.model(family)
    cache = method.encode(model, helpers.context(), None, budget)
    together = generated(model, method, cache, QUERIES, 9)
    evicted = cache.counters["evicted"]
    for query, held in zip(QUERIES, together, strict=True):
        (alone,) = generated(model, method, cache, [query], 9)
        for ours, theirs in zip(held, alone, strict=True):
            for (positions, notes), (expected, others) in zip(ours, theirs, strict=True):
                assert positions == expected
                for name, values in notes.items():
                    torch.testing.assert_close(values, others[name], atol=1e-4, rtol=0)
    assert cache.counters["evicted"] > evicted > 0
