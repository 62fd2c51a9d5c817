"""Prefix caching: which blocks are found, and that what comes out is full attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import helpers
from helpers import FAMILIES, QUERIES, plain_logits
from kvexp.errors import UserError
from kvexp.measure.usage import shares
from kvexp.methods.reuse.prefix_cache import PrefixCache
from kvexp.prompt import Context
from kvexp.tasks.batch import QueryBatch

IDS = helpers.tokens(60, seed=11)
METHOD = PrefixCache(block=4)


def hits(store: Any, *contexts: Context, family: str = "llama", method: PrefixCache = METHOD) -> int:
    """Tokens of contexts that were found, in one layer."""
    cache = method.encode(helpers.model(family), list(contexts), store)
    layers = len(cache.layers)
    tokens = sum(map(len, contexts))
    assert cache.counters["reusable"] == layers * tokens
    assert cache.counters["reused"] + cache.counters["recomputed"] == layers * tokens
    assert cache.counters["reused"] % layers == 0
    return cache.counters["reused"] // layers


def test_whole_blocks_of_the_common_beginning_are_found() -> None:
    store = METHOD.opened(helpers.model("llama"))
    context = Context(IDS[:3], (IDS[3:10], IDS[10:22]))
    assert hits(store, context) == 0
    assert hits(store, context) == 20  # of 22: the last two fill no block
    assert hits(store, Context((), (IDS[:22],))) == 20  # it is the ids that count
    assert hits(store, Context(IDS[:3], (IDS[3:10], IDS[30:42]))) == 8  # 10 tokens in common
    assert hits(store, Context(IDS[:3], (IDS[10:22], IDS[3:10]))) == 0  # the same units, in another order
    assert hits(store, Context((), (IDS[:40],))) == 20
    assert hits(store, Context((), (IDS[:40],))) == 40
    assert hits(store, Context((), (IDS[:2],))) == 0


def test_a_batch_looks_each_of_its_contexts_up() -> None:
    store = METHOD.opened(helpers.model("llama"))
    one, other = Context((), (IDS[:21],)), Context((), (IDS[:8], IDS[40:49]))
    assert hits(store, one, other) == 8  # what the second has in common with the first
    assert hits(store, other, one, Context((), (IDS[:5],))) == 16 + 20 + 4


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_a_batch_is_what_its_contexts_are_one_by_one(family: str) -> None:
    """Rows, counters and what is left in the store, also where the store is too small for all."""
    model = helpers.model(family)
    contexts = [Context(IDS[:5], (IDS[5:n],)) for n in (14, 23, 9)] + [
        Context((), ()),
        Context((), (IDS[:3],)),
    ]
    batch, one_by_one = METHOD.opened(model), METHOD.opened(model)
    METHOD.encode(model, Context((), (IDS[40:56],)), batch)
    batch.capacity = one_by_one.capacity = batch.nbytes()
    METHOD.encode(model, Context((), (IDS[40:56],)), one_by_one)
    cache: Any = METHOD.encode(model, contexts, batch)
    singles: list[Any] = [METHOD.encode(model, one, one_by_one) for one in contexts]
    for name, count in cache.counters.items():
        assert count == sum(one.counters.get(name, 0) for one in singles), name
    assert cache.counters["found"] == 12 + 8 > cache.counters["store_hits"] == 5
    assert list(batch._held) == list(one_by_one._held) and batch.counts == one_by_one.counts
    for b, one in enumerate(singles):
        for mine, theirs in zip(cache.layers, one.layers, strict=True):
            rows = theirs.keys.shape[2] if one.seen else 0
            if rows:
                assert torch.equal(mine.keys[b, :, mine.keys.shape[2] - rows :], theirs.keys[0])
                assert torch.equal(mine.values[b, :, mine.values.shape[2] - rows :], theirs.values[0])


def test_without_a_store_a_batch_shares_a_header() -> None:
    contexts = [Context(IDS[:9], (IDS[10 + 7 * i : 17 + 7 * i],)) for i in range(4)]
    report: Any = METHOD.encode(helpers.model("llama"), contexts)
    assert report.counters["found"] == 3 * 8 and report.counters["unit_tokens"] == 4 * 16
    assert shares(report.counters)["hit_rate"] == 24 / 64


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_found_changes_nothing(family: str) -> None:
    model = helpers.model(family)
    store = METHOD.opened(model)
    METHOD.encode(model, Context((), (IDS[:30],)), store)
    contexts = [
        Context(IDS[:3], (IDS[3:37],)),
        Context((), (IDS[:11], IDS[50:54])),
        Context((), (IDS[20:29],)),
    ]
    cache = METHOD.encode(model, contexts, store)
    with METHOD.attach(model):
        found = QueryBatch(model, cache, QUERIES).logits
    for row, (context, query) in enumerate(zip(contexts, QUERIES, strict=True)):
        expected = plain_logits(model, [*context.ids, *query])[-1]
        torch.testing.assert_close(found[row], expected, atol=1e-4, rtol=0)


def test_a_small_store_forgets() -> None:
    model = helpers.model("llama")
    one = METHOD.encode(model, Context((), (IDS[:8],)), store := METHOD.opened(model))
    size = store.nbytes()
    assert size == 8 * 3 * 2 * 2 * 16 * 4 and one.counters["reused"] == 0
    store.capacity = size
    METHOD.encode(model, Context((), (IDS[20:28],)), store)
    assert hits(store, Context((), (IDS[:8],))) == 0


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_an_overfull_store_keeps_the_beginning(kind: str, tmp_path: Path) -> None:
    """A block is found behind those before it alone, so that the last ones have to leave first."""
    model, method = helpers.model("llama"), PrefixCache(block=4, store=kind)  # type: ignore[arg-type]

    def opened() -> Any:
        return method.opened(model, tmp_path, "ab")

    store = opened()
    method.encode(model, Context((), (IDS[40:44],)), store)
    [size] = {store.size(chunk) for chunk in store._held.values()}
    limit = int(4.5 * size)

    def again(ids: Any) -> int:
        """Tokens found, by another process where the store is on disk."""
        nonlocal store
        store = opened() if kind == "disk" else store
        store.capacity = limit
        if store.files is not None:
            store.files.capacity = limit
        return hits(store, Context((), (ids,)), method=method)

    assert again(IDS[:24]) == 0
    assert again(IDS[:24]) == 16  # six blocks, of which the first four fit
    assert again((*IDS[:8], *IDS[40:48])) == 8
    assert again((*IDS[:8], *IDS[50:58])) == 8  # the beginning stays, its other end leaves
    assert again(IDS[:24]) == 8
    assert again(IDS[:24]) == 16


def test_a_block_has_tokens() -> None:
    with pytest.raises(UserError, match="use 1 or more tokens"):
        PrefixCache(block=0)
