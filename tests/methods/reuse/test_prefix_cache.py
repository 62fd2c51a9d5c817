"""Prefix caching: which blocks are found, and that what comes out is full attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import helpers
from helpers import FAMILIES, QUERIES, plain_logits
from kvexp.errors import UserError
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
    assert hits(store, one, other) == 0  # they become known together
    assert hits(store, other, one, Context((), (IDS[:5],))) == 16 + 20 + 4


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


def test_a_block_has_tokens() -> None:
    with pytest.raises(UserError, match="use 1 or more tokens"):
        PrefixCache(block=0)
