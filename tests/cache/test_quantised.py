"""Quantised layers, fed by hand and compared with attention to what a slow reference says they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import helpers
from history import GROUPS, HEADS, WIDTH, History, padded, schedules
from kvexp.attention.attach import attached
from kvexp.cache.dense import DenseLayer
from kvexp.cache.evicting import EvictingLayer
from kvexp.cache.kv_cache import KVCache, empty_cache, prefill
from kvexp.cache.quantised import QuantisedLayer, quantised_cache
from kvexp.cache.scheme import Scheme
from kvexp.errors import UserError
from storage_reference import held

KIVI, BLOCKS = Scheme(2, 2, 4), Scheme(2, 4, 3, blockwise=True)
OTT = Scheme(2, 4, 3, blockwise=True, outliers=1, pool=2)
SCHEMES = [KIVI, Scheme(4, 3, 3), BLOCKS, OTT, Scheme(8, 3, 0, True, 2, 4)]


def expected(history: History, count: int, scheme: Scheme) -> torch.Tensor:
    """The output for the latest `count` tokens, over what is held of each sequence's real rows."""
    start, stop = history.at - count, history.at
    output = torch.zeros(*history.queries.shape[:2], count, WIDTH, dtype=torch.float64)
    for b, columns in enumerate(history.columns):
        before, new = (columns[a:z].nonzero()[:, 0] + a for a, z in ((0, start), (start, stop)))
        seen = held(history.keys[b][:, before], history.values[b][:, before], scheme)
        keys = torch.cat([seen.keys, history.keys[b][:, new]], dim=1).repeat_interleave(GROUPS, 0)
        values = torch.cat([seen.values, history.values[b][:, new]], dim=1).repeat_interleave(GROUPS, 0)
        scores = history.queries[b][:, start:stop] @ keys.mT * 0.7
        later = torch.cat([before, new])[None] > torch.arange(start, stop)[:, None]
        output[b] = scores.masked_fill(later, -torch.inf).softmax(-1).nan_to_num() @ values
    return output


def check(history: History, layer: DenseLayer, count: int, scheme: Scheme) -> None:
    """Feed the next tokens and compare the output of the real ones."""
    output = history.feed(layer, count)
    real = history.columns[:, history.at - count : history.at]
    ours, theirs = (x.transpose(1, 2)[real] for x in (output, expected(history, count, scheme)))
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
    assert output.isfinite().all()


def junk(layer: DenseLayer, batch: int) -> None:
    """Append a row that nobody else may see, and attend."""
    other = History(torch.ones(batch, layer.get_seq_length() + 1, dtype=torch.bool), seed=50)
    other.at = layer.get_seq_length()
    other.feed(layer, 1)


@given(
    schedule=schedules(),
    scheme=st.sampled_from(SCHEMES),
    forks=st.lists(st.booleans(), min_size=40, max_size=40),
    seed=st.integers(0, 100),
)
@settings(max_examples=50, deadline=None)
def test_any_schedule_with_forks_equals_the_slow_reference(
    schedule: Any, scheme: Scheme, forks: list[bool], seed: int
) -> None:
    columns, chunks = schedule
    history, layer = History(columns, seed=seed), QuantisedLayer(scheme, {})
    for count, fork in zip(chunks, forks, strict=False):
        if fork:  # what a parent or a sibling appends must not show
            parent, sibling, layer = layer, layer.fork(), layer.fork()
            if bool(columns[:, : history.at].all()):
                junk(parent, len(columns))
                junk(sibling, len(columns))
        check(history, layer, count, scheme)
    assert layer.get_seq_length() == history.at
    assert layer.entries() == int(columns.sum(1).max())


@given(scheme=st.sampled_from(SCHEMES), pads=st.sampled_from([[0, 0], [0, 3], [4, 1]]), decode=st.booleans())
@settings(max_examples=20, deadline=None)
def test_a_dense_cache_that_is_quantised_equals_the_slow_reference(
    scheme: Scheme, pads: list[int], decode: bool
) -> None:
    columns = padded(pads, before=0, query=16, after=6)  # contexts padded on the left
    history, dense = History(columns), DenseLayer()
    history.feed(dense, 9)
    history.feed(dense, 7)
    cache = quantised_cache(KVCache([dense], columns=columns[:, :16]), [scheme], decode)
    assert torch.equal(cache.columns, columns[:, :16]) and cache.seen == 16
    layer = cache.fork().layers[0]
    for _ in range(6 if decode else 1):
        check(history, layer, 1, scheme)
    if not decode:
        before = [t.clone() for source in layer.sources for t in source.tensors()]
        history.feed(layer, 5)
        after = [t for source in layer.sources for t in source.tensors()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert sum(lane.keys.rows for lane in layer.lanes) == sum(
            lane.keys.rows for lane in cache.layers[0].lanes
        )


@pytest.mark.parametrize("scheme", [KIVI, OTT])
def test_the_newest_rows_are_bit_exact(scheme: Scheme) -> None:
    history, layer = History(torch.ones(2, 30, dtype=torch.bool)), QuantisedLayer(scheme, {})
    for count in (13, 1, 1, 1, 1, 1):
        history.feed(layer, count)
        (lane,) = layer.lanes
        keys, values = scheme.packed(history.at)
        assert torch.equal(lane.dense_keys, history.keys[:, :, keys : history.at])
        assert torch.equal(lane.dense_values, history.values[:, :, values : history.at])
        assert history.at - values >= scheme.residual
        assert scheme.blockwise or history.at - values == scheme.residual  # KIVI: exactly R values


@pytest.mark.parametrize(("scheme", "rows"), [(KIVI, 13), (Scheme(4, 4, 3, True), 13), (KIVI, 3)])
@pytest.mark.parametrize("batch", [1, 3])
def test_bytes_are_those_of_codes_scales_and_the_newest_rows(scheme: Scheme, rows: int, batch: int) -> None:
    history, layer = History(torch.ones(batch, 40, dtype=torch.bool)), QuantisedLayer(scheme, {})
    history.feed(layer, rows)
    keys, values = scheme.packed(rows)
    groups = -(-WIDTH // scheme.group)
    codes = (keys + values) * WIDTH * scheme.bits // 8
    scales = 2 * 2 * (keys // scheme.group * WIDTH + values * groups)
    full = 8 * WIDTH * ((rows - keys) + (rows - values))  # float64 rows
    total = batch * HEADS * (codes + scales + full)
    assert layer.nbytes() == KVCache([layer]).nbytes() == total
    fork = layer.fork()
    assert layer.nbytes() == fork.nbytes() == total  # nothing is held twice
    assert KVCache([layer, fork]).nbytes() == total
    assert KVCache([layer]).sequence_bytes() == total // batch


def test_outliers_are_counted() -> None:
    history, layer = History(torch.ones(1, 40, dtype=torch.bool)), QuantisedLayer(OTT, {})
    history.feed(layer, 8)  # one block of four, one outlier in each head
    plain = QuantisedLayer(BLOCKS, {})
    History(torch.ones(1, 40, dtype=torch.bool)).feed(plain, 8)
    assert layer.nbytes() - plain.nbytes() == HEADS * (2 * WIDTH * 8 + 4 + 1)
    assert layer.entries() == plain.entries() == 8


def test_rows_are_counted_once_when_they_are_packed() -> None:
    counters: dict[str, int] = {}
    history, layer = History(torch.ones(2, 30, dtype=torch.bool)), QuantisedLayer(KIVI, counters)
    history.feed(layer, 4)
    assert counters == {"quantised": 0}
    history.feed(layer, 6)
    assert counters == {"quantised": 2 * 6}
    history.feed(layer.fork(), 1)
    assert counters == {"quantised": 2 * 7}


@pytest.mark.parametrize("pads", [[0, 0, 0], [0, 2, 1]])
def test_choosing_sequences(pads: list[int]) -> None:
    columns = padded(pads, before=7, query=4, after=8)
    history, layer = History(columns), QuantisedLayer(KIVI, {})
    history.feed(layer, 7)
    layer = layer.fork()
    for count in (4, 1, 1):
        history.feed(layer, count)
    order = torch.tensor([2, 0, 0, 1])
    layer.reorder_cache(order)
    assert layer.batch == 4
    for name in ("columns", "keys", "values", "queries", "positions"):
        setattr(history, name, getattr(history, name)[order])
    for _ in range(5):
        check(history, layer, 1, KIVI)
    layer.batch_select_indices(torch.tensor([1, 3]))
    layer.batch_repeat_interleave(2)
    assert layer.batch == 4


def test_one_context_serves_a_batch_that_follows_without_a_fork() -> None:
    history, layer = History(torch.ones(3, 20, dtype=torch.bool)), QuantisedLayer(KIVI, {})
    for x in (history.keys, history.values):
        x[:, :, :9] = x[:1, :, :9].clone()
    history.feed(layer, 9, batch=1)
    assert layer.batch == 1
    for count in (1, 3, 1, 1):
        check(history, layer, count, KIVI)
    assert layer.batch == 3 and layer.sources[0].batch == 1


def test_an_observer_sees_sources_packed_rows_and_the_rest() -> None:
    history, layer = History(torch.ones(2, 30, dtype=torch.bool)), QuantisedLayer(KIVI, {})
    history.feed(layer, 9)
    layer = layer.fork()
    history.feed(layer, 7)
    seen: list[Any] = []
    layer.observer = lambda *told: seen.append(told)
    output = history.feed(layer, 2)
    ((told, call, before, local),) = seen
    assert told is layer and call.query.shape[2] == 2 and len(before) == 2
    mass = torch.stack([*(s for _, s in before), local[1]]).softmax(0)
    merged = sum(m[..., None] * a for m, a in zip(mass, [*(a for a, _ in before), local[0]], strict=True))
    torch.testing.assert_close(output, merged)
    assert layer.fork().observer is None


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(UserError, match="packed rows cannot: quantise the cache of full"):
        quantised_cache(KVCache([EvictingLayer(0)]), [KIVI])
    with pytest.raises(RuntimeError, match="no row can leave a quantised cache"):
        QuantisedLayer(KIVI, {}).compact(torch.tensor([0]))


def test_attention_never_waits_for_the_device() -> None:
    # A meta tensor has no numbers: whatever asks for one, and so would make a GPU wait, fails.
    history, layer = History(torch.ones(2, 40, dtype=torch.bool)), QuantisedLayer(KIVI, {})
    for name in ("keys", "values", "queries"):
        setattr(history, name, getattr(history, name).to("meta"))
    for count in (9, 3, 1, 1, 1, 1):
        assert history.feed(layer, count, needs_lse=True).device.type == "meta"
        layer = layer.fork()


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_sliding_layers_and_what_a_layer_stands_on_stay(family: str) -> None:
    model, ids = helpers.model(family), helpers.tokens(20)
    with attached(model):
        context = prefill(model, ids, empty_cache(model))
        fork = prefill(model, ids, context.fork())
    cache = quantised_cache(fork, [KIVI] * len(fork.layers))
    for layer, before in zip(cache.layers, fork.layers, strict=True):
        if layer.window is not None:
            assert layer is before
            continue
        assert isinstance(layer, QuantisedLayer)
        assert layer.sources[0] is before.sources[0] and layer.entries() == 40
        assert layer.nbytes() < before.nbytes()


def test_a_long_prompt_is_not_kept_alive_by_what_remains_of_it() -> None:
    history, layer = History(torch.ones(1, 400, dtype=torch.bool)), QuantisedLayer(KIVI, {})
    history.feed(layer, 399)
    whole = 399 * HEADS * WIDTH * 8
    for x in [layer.keys, layer.values, *layer.tensors()]:
        assert x.untyped_storage().nbytes() < whole / 4


@pytest.mark.parametrize("forked", [True, False])
def test_pads_in_front_of_an_encoded_context_are_refused(forked: bool) -> None:
    columns = torch.ones(2, 12, dtype=torch.bool)
    history, layer = History(columns), QuantisedLayer(KIVI, {})
    history.feed(layer, 10)
    layer = layer.fork() if forked else layer
    columns[0, :2] = False
    with pytest.raises(RuntimeError, match="pads must stand between the context and the query"):
        history.feed(layer, 1)
