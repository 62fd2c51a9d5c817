"""Dense layers, fed by hand and compared with attention over everything that was ever appended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from history import GROUPS, HEADS, WIDTH, History, numbers, padded, schedules
from kvexp.attention.function import Call, Padding
from kvexp.cache.dense import DenseLayer
from kvexp.cache.room import SLACK


@given(
    schedule=schedules(),
    window=st.sampled_from([None, 1, 2, 3, 5, 8]),
    forks=st.lists(st.booleans(), min_size=40, max_size=40),
    seed=st.integers(0, 100),
)
@settings(max_examples=150, deadline=None)
def test_any_schedule_with_forks_equals_attention_to_all_rows(
    schedule: Any, window: int | None, forks: list[bool], seed: int
) -> None:
    columns, chunks = schedule
    history, layer = History(columns, window, seed), DenseLayer(window=window)
    longest, others = max(chunks), []
    for count, fork in zip(chunks, forks, strict=False):
        if fork:
            others = [layer, layer.fork()]
            layer = layer.fork()
        for other in others[:1]:  # what a parent or a sibling appends must not show
            other.update(*numbers(2, len(columns), HEADS, count, WIDTH, seed=9), kwargs={})
        history.check(layer, count)
        for other in others[1:]:
            other.update(*numbers(2, len(columns), HEADS, count, WIDTH, seed=9), kwargs={})
        if window is not None:
            widest = int((~columns).sum(1).max())  # pads lie between rows that are seen
            assert layer.rows < max(2 * window, window + longest) + widest
    assert layer.get_seq_length() == history.at


def test_a_window_counts_positions_so_that_pads_do_not_widen_it() -> None:
    # Row 1 has three pads before its last token, which is the 6th real one: it sees the real tokens 3, 4, 5.
    columns = torch.tensor([[1] * 9, [1, 1, 1, 1, 1, 0, 0, 0, 1]]).bool()
    history, layer = History(columns), DenseLayer(window=3)
    history.feed(layer, 5)
    span, keywords = slice(5, 9), {"position_ids": history.positions[:, 5:]}
    key, value = layer.update(history.keys[:, :, span], history.values[:, :, span], kwargs=keywords)
    visible = layer.visible(history.call(key, value, span))
    assert visible is not None and visible.shape == (2, 1, 4, 9)
    assert visible[0, 0, -1].nonzero().flatten().tolist() == [6, 7, 8]
    assert visible[1, 0, -1].nonzero().flatten().tolist() == [3, 4, 8]
    assert all(visible[1, 0, t, 5 + t] for t in range(3))  # a pad sees itself


def test_the_window_of_the_call_goes_first() -> None:
    history, layer = History(torch.ones(1, 6, dtype=torch.bool), window=2), DenseLayer(window=4)
    history.check(layer, 5, window=2)
    history.check(layer, 1, window=2)


def test_a_mask_is_built_only_where_one_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    real = DenseLayer.visible

    def visible(layer: DenseLayer, call: Call) -> torch.Tensor | None:
        built.append(real(layer, call))
        return built[-1]

    monkeypatch.setattr(DenseLayer, "visible", visible)
    history, layer = History(torch.ones(2, 12, dtype=torch.bool)), DenseLayer()
    history.check(layer, 6)
    assert built == []  # a triangle
    history.check(layer, 1)
    assert built == [None]  # one token sees all rows
    history.check(layer, 2)
    assert built[1].shape == (1, 1, 2, 9)


def test_decoding_behind_padded_queries_needs_no_mask() -> None:
    columns = padded([0, 2], before=3, query=4, after=3)
    history, layer = History(columns), DenseLayer()
    history.feed(layer, 3)
    layer = layer.fork()
    history.check(layer, 4)
    layer = layer.fork()  # from here on no own row is a pad
    for _ in range(3):
        history.check(layer, 1)
        assert (
            layer.visible(history.call(layer.keys, layer.values, slice(history.at - 1, history.at))) is None
        )


def test_attention_never_waits_for_the_device() -> None:
    # A meta tensor has no numbers: whatever asks for one, and so would make a GPU wait, fails.
    columns = padded([0, 2], before=3, query=4, after=2)
    padding = Padding(columns)

    def feed(layer: DenseLayer, count: int) -> None:
        rows = torch.empty(2, HEADS, count, WIDTH, device="meta")
        positions = torch.zeros(2, count, dtype=torch.long)
        key, value = layer.update(rows, rows, kwargs={"position_ids": positions})
        query = torch.empty(2, HEADS * GROUPS, count, WIDTH, device="meta")
        known = {"query": query, "padding": padding, "needs_lse": True}
        call = History(columns).call(key, value, slice(0, count), **known)
        output, lse = layer.attend(call)
        layer.after(call)
        assert output.device.type == "meta" and output.shape == query.shape
        assert lse is not None and lse.shape == query.shape[:-1]

    for window in (None, 50):
        layer = DenseLayer(window=window)
        for count in (3, 4, 1, 1):
            feed(layer, count)
            layer = layer.fork()


def test_appending_writes_into_room_that_is_left() -> None:
    history, layer = History(torch.ones(1, 4 * SLACK, dtype=torch.bool)), DenseLayer()
    history.feed(layer, 10)
    history.feed(layer, 1)
    place = layer.keys.data_ptr()
    for _ in range(SLACK):
        history.check(layer, 1)
    assert layer.keys.data_ptr() == place and layer.rows == 11 + SLACK
    history.check(layer, 1)
    assert layer.keys.data_ptr() != place
    assert torch.equal(layer.keys, history.keys[:, :, : layer.rows])
    assert layer.nbytes() == 2 * layer.rows * HEADS * WIDTH * 8  # room is not counted


def test_a_fork_and_its_parent_grow_apart() -> None:
    history, parent = History(torch.ones(1, 40, dtype=torch.bool)), DenseLayer()
    history.feed(parent, 10)
    history.feed(parent, 1)  # from here on the buffer has room
    keys = parent.keys.clone()
    one, other = parent.fork(), parent.fork()
    assert one.sources[0].tensors()[0].data_ptr() == parent.keys.data_ptr()  # shared, not copied
    junk = numbers(1, HEADS, 1, WIDTH, seed=5)
    one.update(junk, junk, kwargs={})
    parent.update(2 * junk, 2 * junk, kwargs={})
    assert torch.equal(parent.keys[:, :, :11], keys) and torch.equal(parent.keys[:, :, 11:], 2 * junk)
    assert torch.equal(one.keys, junk) and torch.equal(one.sources[0].tensors()[0], keys)
    assert (parent.rows, one.rows, other.rows, other.seen) == (12, 1, 0, 11)
    assert (one.entries(), other.entries()) == (12, 11)
    history.check(other, 3)


def test_a_sliding_fork_copies_when_it_appends_and_not_before() -> None:
    history, parent = History(torch.ones(1, 40, dtype=torch.bool), window=4), DenseLayer(window=4)
    history.feed(parent, 3)
    history.feed(parent, 1)
    twin, keys = parent.fork(), parent.keys.clone()
    assert twin.keys.data_ptr() == parent.keys.data_ptr()
    junk = numbers(1, HEADS, 1, WIDTH, seed=5)
    parent.update(junk, junk, kwargs={})
    assert torch.equal(twin.keys, keys)
    history.check(twin, 1)
    assert torch.equal(parent.keys, torch.cat([keys, junk], 2))


@given(
    keep=st.sets(st.integers(0, 9), min_size=1),
    shuffle=st.randoms(use_true_random=False),
    more=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_compact_keeps_rows_in_order_and_lengths_true(keep: set[int], shuffle: Any, more: int) -> None:
    history, layer = History(torch.ones(2, 20, dtype=torch.bool)), DenseLayer()
    history.feed(layer, 10)
    order = sorted(keep)
    mixed = list(order)
    shuffle.shuffle(mixed)
    layer.compact(torch.tensor(mixed))
    history.forgotten = [slot for slot in range(10) if slot not in keep]
    assert layer.slots.tolist() == order
    assert torch.equal(layer.positions, history.positions[:, order])
    assert torch.equal(layer.keys, history.keys[:, :, order])
    assert (layer.rows, layer.seen, layer.get_mask_sizes(3)) == (len(keep), 10, (13, 0))
    history.check(layer, more)
    history.check(layer.fork(), 1)


def test_an_observer_sees_each_source_and_the_own_rows() -> None:
    history, layer = History(torch.ones(2, 9, dtype=torch.bool)), DenseLayer()
    history.feed(layer, 4)
    layer = layer.fork()
    history.feed(layer, 2)
    layer = layer.fork()
    seen: list[Any] = []
    layer.observer = lambda *told: seen.append(told)
    history.check(layer, 3)
    ((told, call, before, local),) = seen
    assert told is layer and call.query.shape == (2, HEADS * GROUPS, 3, WIDTH)
    spans = [slice(0, 4), slice(4, 6), slice(6, 9)]
    for span, (a, s) in zip(spans, [*before, local], strict=True):
        keys = history.keys[:, :, span].repeat_interleave(GROUPS, 1)
        scores = history.queries[:, :, 6:9] @ keys.mT * 0.7
        if span.start == 6:
            scores = scores.masked_fill(~torch.ones(3, 3, dtype=torch.bool).tril(), -torch.inf)
        torch.testing.assert_close(s, scores.logsumexp(-1))
        values = history.values[:, :, span].repeat_interleave(GROUPS, 1)
        torch.testing.assert_close(a, scores.softmax(-1) @ values)
    assert layer.fork().observer is None


def test_what_a_layer_refuses() -> None:
    layer, row = DenseLayer(), torch.zeros(1, 1, 1, 4)
    with pytest.raises(RuntimeError, match="does not pass its keywords"):
        layer.update(row, row)
    with pytest.raises(RuntimeError, match="encode the context again"):
        layer.reset()
    assert (layer.rows, layer.get_seq_length(), layer.entries(), layer.nbytes()) == (0, 0, 0, 0)
    assert layer.get_max_length() == -1 and not layer.is_sliding
