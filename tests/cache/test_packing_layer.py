"""Packing layers, fed by hand and compared with attention over rows that a slow reference keeps and packs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from history import GROUPS, HEADS, WIDTH, History, padded, schedules
from kvexp.cache.evicting import EvictingLayer
from kvexp.cache.kv_cache import KVCache
from kvexp.cache.packed_kept import PackedKept
from kvexp.cache.packing_layer import PackingLayer, packing_cache
from kvexp.cache.quantised_unit import quantised
from kvexp.cache.scheme import Scheme
from kvexp.methods.eviction.selection import choose

KIVI = Scheme(2, 2, 4)
OTT = Scheme(2, 3, 2, blockwise=True, outliers=1, pool=2)
SCHEMES = [KIVI, Scheme(4, 3, 3), OTT, Scheme(8, 4, 0, blockwise=True)]


class Chance:
    """An evictor that lets rows leave now and then, of some sequences; it remembers which slots stayed."""

    wants_lse = wants_rows = False

    def __init__(self, seed: int, ragged: bool, often: float = 0.5) -> None:
        self.numbers, self.ragged, self.often = torch.Generator().manual_seed(seed), ragged, often
        self.kept: list[list[list[int]]] | None = None  # of each sequence and head, after this forward

    def _draw(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.numbers))

    def after(self, layer: EvictingLayer, call: Any) -> None:
        self.kept = None
        if torch.rand((), generator=self.numbers) > self.often:
            return
        layer.own()
        held = layer.held()
        there = held.mask().sum(-1).tolist()
        rows = []
        for heads in there:
            act = self._draw(0, 3) > 0
            same = self._draw(min(1, min(heads)), min(heads))
            some = [self._draw(min(1, n), n) for n in heads] if self.ragged else [same] * HEADS
            rows.append(some if act else heads)
        scores = torch.rand(held.slots.shape, generator=self.numbers)
        indices, counted = choose(scores, rows, layer.valid)
        slots = held.slots.gather(2, indices)
        mask = torch.ones_like(slots, dtype=torch.bool) if counted is None else counted
        uneven = any(len(set(heads)) > 1 for heads in rows)
        layer.keep(indices, counted, uneven)
        self.kept = [[slots[b, h][mask[b, h]].tolist() for h in range(HEADS)] for b in range(len(rows))]


class Slow:
    """The rows of each head as lists of (slot, key, value), packed with those of the same head alone."""

    def __init__(self, history: History, scheme: Scheme) -> None:
        self.history, self.scheme = history, scheme
        self.rows: list[list[list[Any]]] = [[[] for _ in range(HEADS)] for _ in history.columns]

    def append(self, count: int) -> None:
        for b, columns in enumerate(self.history.columns):
            for slot in range(self.history.at - count, self.history.at):
                for h in range(HEADS * bool(columns[slot])):
                    row = slot, self.history.keys[b, h, slot], self.history.values[b, h, slot]
                    self.rows[b][h].append(row)

    def keep(self, kept: list[list[list[int]]]) -> None:
        for b, heads in enumerate(kept):
            if sum(map(len, heads)) < sum(map(len, self.rows[b])):
                for h, slots in enumerate(heads):
                    self.rows[b][h] = self.packed([row for row in self.rows[b][h] if row[0] in slots])

    def packed(self, rows: list[Any]) -> list[Any]:
        count = max(0, len(rows) - self.scheme.residual)
        if not count:
            return rows
        keys, values = (torch.stack([row[i] for row in rows[:count]])[None, None] for i in (1, 2))
        keys, values = quantised(keys, values, self.scheme).restored(torch.float64)
        slots = [row[0] for row in rows[:count]]
        return [*zip(slots, keys[0, 0], values[0, 0], strict=True), *rows[count:]]

    def expected(self, count: int) -> torch.Tensor:
        """The output for the latest `count` tokens, which have been appended."""
        start = self.history.at - count
        queries = self.history.queries[:, :, start : self.history.at]
        output = torch.zeros(*queries.shape[:3], WIDTH, dtype=torch.float64)
        for b, heads in enumerate(self.rows):
            for h in range(HEADS * GROUPS):
                slots = torch.tensor([row[0] for row in heads[h // GROUPS]])
                keys, values = (torch.stack([row[i] for row in heads[h // GROUPS]]) for i in (1, 2))
                later = slots[None] > torch.arange(start, self.history.at)[:, None]
                scores = (queries[b, h] @ keys.T * 0.7).masked_fill(later, -torch.inf)
                output[b, h] = scores.softmax(-1).nan_to_num() @ values
        return output


def followed(history: History, layer: EvictingLayer, slow: Slow, count: int) -> None:
    """Feed the next tokens, compare the output of the real ones, and let the reference follow."""
    output = history.feed(layer, count)
    slow.append(count)
    real = history.columns[:, history.at - count : history.at]
    ours, theirs = (x.transpose(1, 2)[real] for x in (output, slow.expected(count)))
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
    if layer.evictor.kept is not None:  # type: ignore[attr-defined]
        slow.keep(layer.evictor.kept)  # type: ignore[attr-defined]


def same_rows(layer: EvictingLayer, slow: Slow) -> None:
    """Every row stands at its true slot and position, with the key and value that the reference has."""
    layer.own()
    held = layer.held()
    for b, heads in enumerate(slow.rows):
        for h, rows in enumerate(heads):
            mask = held.mask()[b, h]
            slots = held.slots[b, h][mask].tolist()
            assert slots == [row[0] for row in rows]
            assert held.positions[b, h][mask].tolist() == slow.history.positions[b][slots].tolist()
            for x, i in ((held.keys, 1), (held.values, 2)):
                assert torch.equal(x[b, h][mask], torch.stack([row[i] for row in rows]))


@given(
    schedule=schedules(),
    scheme=st.sampled_from(SCHEMES),
    ragged=st.booleans(),
    forks=st.lists(st.booleans(), min_size=40, max_size=40),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30, deadline=None)
def test_any_schedule_equals_the_slow_reference(
    schedule: Any, scheme: Scheme, ragged: bool, forks: list[bool], seed: int
) -> None:
    columns, chunks = schedule
    history, layer = History(columns, seed=seed), PackingLayer(0, scheme, {})
    layer.evictor = evictor = Chance(seed, ragged)
    slow = Slow(history, scheme)
    for count, fork in zip(chunks, forks, strict=False):
        if fork:  # a sibling that lets rows leave takes nothing from this one
            sibling, layer = layer.fork(), layer.fork()
            layer.evictor = evictor
            if sibling.is_initialized and sibling.entries():
                sibling.own()
                first = torch.zeros(*sibling.keys.shape[:2], 1, dtype=torch.long)
                sibling.keep(first + sibling.rows - 1, None, False)
        followed(history, layer, slow, count)
    most = max(-(-sum(map(len, heads)) // HEADS) for heads in slow.rows)
    assert layer.entries() == most
    same_rows(layer, slow)


def test_a_sequence_whose_turn_has_not_come_keeps_its_packed_rows_as_they_are() -> None:
    history, layer = History(torch.ones(2, 30, dtype=torch.bool)), PackingLayer(0, KIVI, counters := {})
    layer.evictor = Chance(0, False, often=0.0)
    history.feed(layer, 20)
    layer.own()
    both = torch.arange(20 - 14, 20).expand(2, HEADS, -1)
    layer.keep(both, None, False)
    assert counters == {"quantised": 2 * (14 - 4)}
    codes = _packed(layer).sequence(1)[0].unit.keys.codes  # type: ignore[union-attr]
    history.feed(layer, 2)
    layer.own()
    first = torch.arange(16).expand(2, HEADS, -1).clone()
    valid = torch.ones(2, HEADS, 16, dtype=torch.bool)
    valid[0, :, :7] = False  # nine rows of the first sequence stay, all of the second
    layer.keep(first, valid, False)
    assert _packed(layer).counts() == [[5, 5], [10, 10]]
    assert torch.equal(_packed(layer).sequence(1)[0].unit.keys.codes, codes)  # type: ignore[union-attr]
    assert counters == {"quantised": 2 * 10 + 5}
    assert layer.entries() == 16


@pytest.mark.parametrize("ragged", [False, True])
def test_bytes_are_those_of_codes_scales_places_and_rows_in_full(ragged: bool) -> None:
    history, layer = History(torch.ones(1, 40, dtype=torch.bool)), PackingLayer(0, KIVI, {})
    layer.evictor = Chance(0, False, often=0.0)
    history.feed(layer, 20)
    layer.own()
    lengths = [13, 9] if ragged else [13, 13]
    indices, counted = choose(torch.rand(1, HEADS, 20), [lengths])
    layer.keep(indices, counted, ragged)
    total = 0
    for n in lengths:
        groups = -(-(n - 4) // 2)  # of keys: two rows each, the last one shorter
        total += (n - 4) * 2 * WIDTH * 2 // 8  # codes of 2 bits
        total += 4 * (groups * WIDTH + (n - 4) * WIDTH // 2)  # a scale and a minimum, two bytes each
        total += 4 * 2 * WIDTH * 8 + n * 8  # rows in full, slots and positions of all
    assert layer.nbytes() == KVCache([layer]).sequence_bytes() == total
    fork = layer.fork()
    assert KVCache([layer, fork]).nbytes() == total  # nothing is held twice
    assert layer.entries() == fork.entries() == -(-sum(lengths) // 2)


def test_where_nothing_is_packed_it_is_an_evicting_layer() -> None:
    columns, wide = padded([0, 3], before=12, query=4, after=8), Scheme(2, 4, 64, blockwise=True)
    outputs = []
    for layer in (EvictingLayer(0), PackingLayer(0, wide, {})):
        history, layer.evictor = History(columns), Chance(3, True)
        outputs.append(torch.cat([history.feed(layer, count) for count in (12, 4, *[1] * 8)], dim=2))
        assert not any(isinstance(source, PackedKept) for source in layer.sources)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("pads", [[0, 0], [0, 3]])
def test_a_cache_that_has_lost_rows_is_packed_at_once(pads: list[int]) -> None:
    columns = padded(pads, before=0, query=12, after=6)  # contexts padded on the left
    history, layer = History(columns), EvictingLayer(0)
    layer.evictor = evictor = Chance(0, False, often=0.0)
    slow = Slow(history, KIVI)
    followed(history, layer, slow, 12)
    layer.own()
    indices, counted = choose(torch.rand(2, HEADS, 12), [[9, 9]] * 2, layer.valid)
    slots = layer.slots.expand(2, HEADS, -1).gather(2, indices)
    layer.keep(indices, counted, False)
    slow.keep([[slots[b, h].tolist() for h in range(HEADS)] for b in range(2)])
    cache = packing_cache(KVCache([layer], columns=columns[:, :12]), [KIVI])
    [packing] = cache.layers
    assert isinstance(packing, PackingLayer)
    packed = [[5, 5], [0, 0] if pads[1] else [5, 5]]  # the shorter one has nine rows, and has lost none
    assert _packed(packing).counts() == packed and cache.counters == {"quantised": sum(map(max, packed))}
    packing.evictor = evictor
    for _ in range(6):
        followed(history, packing, slow, 1)
    same_rows(packing.fork(), slow)


def test_sequences_can_be_chosen() -> None:
    history, layer = History(torch.ones(3, 30, dtype=torch.bool)), PackingLayer(0, KIVI, {})
    layer.evictor = Chance(0, False, often=0.0)
    history.feed(layer, 16)
    for lengths in ([[12, 12]] * 3, [[11, 11], [12, 12], [9, 7]]):
        layer.own()
        indices, counted = choose(torch.rand(3, HEADS, layer.rows), lengths, layer.valid)
        layer.keep(indices, counted, lengths[-1][0] != lengths[-1][1])
        fork = layer.fork()
        fork.batch_select_indices(torch.tensor([2, 0, 2]))
        layer.own()
        fork.own()
        ours, theirs = fork.held(), layer.held().select(torch.tensor([2, 0, 2]))
        assert torch.equal(ours.mask().sum(-1), theirs.mask().sum(-1))
        for one, other in ((ours.keys, theirs.keys), (ours.slots, theirs.slots)):
            assert torch.equal(one[ours.mask()], other[theirs.mask()])


def _packed(layer: EvictingLayer) -> PackedKept:
    [source] = [source for source in layer.sources if isinstance(source, PackedKept)]
    return source
