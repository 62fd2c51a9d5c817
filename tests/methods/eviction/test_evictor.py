"""When rows leave: each sequence of a batch by its own clock, whatever the others do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import helpers
from kvexp.cache.evicting import EvictingLayer
from kvexp.methods.eviction import scale
from kvexp.methods.eviction.adakv import AdaKV
from kvexp.methods.eviction.base import EvictionMethod
from kvexp.methods.eviction.expected_attention import ExpectedAttention
from kvexp.methods.eviction.h2o import H2O
from kvexp.methods.eviction.raas import RaaS
from kvexp.methods.eviction.rkv import RKV
from kvexp.methods.eviction.snapkv import SnapKV
from kvexp.methods.eviction.tova import TOVA
from kvexp.methods.eviction.triattention import TriAttention
from kvexp.methods.eviction.two_phase import TwoPhase
from kvexp.tasks.batch import QueryBatch
from triattention_reference import statistics

CONTEXTS = [helpers.Context((), (helpers.tokens(n, seed=n),)) for n in (45, 20, 31)]
QUERIES = [helpers.tokens(n, seed=70 + n) for n in (5, 9, 2)]
FED = [helpers.tokens(14, seed=n) for n in (1, 2, 3)]
Kept = list[list[list[list[int]]]]  # [token][layer][head]: positions


@torch.no_grad()
def kept(method: EvictionMethod, which: Sequence[int], budget: int) -> list[Kept]:
    """What each of the sequences `which` holds after each token that it is fed, encoded as one batch."""
    model = helpers.model("qwen3")
    cache: Any = method.encode(model, [CONTEXTS[i] for i in which], None, budget)
    found: list[Kept] = [[] for _ in which]
    with method.attach(model):
        batch = QueryBatch(model, cache, [QUERIES[i] for i in which])
        columns = batch.columns
        for step in range(len(FED[0])):
            token = torch.tensor([[FED[i][step]] for i in which])
            columns = torch.cat([columns, columns.new_ones(len(which), 1)], dim=1)
            batch._forward(batch.cache, token, batch._mask(columns), batch.next_position + step, 1)
            held = [_held(layer) for layer in batch.cache.layers]
            for b, steps in enumerate(found):
                steps.append([layer[b if len(layer) > 1 else 0] for layer in held])
    return found


def _held(layer: Any) -> list[list[list[int]]]:
    """The positions that each sequence and head holds; the layer's state stays as it is."""
    twin = layer.fork()
    twin.own()
    rows = twin.held()
    mask = rows.mask()
    return [
        [rows.positions[b, h][mask[b, h]].tolist() for h in range(mask.shape[1])] for b in range(len(mask))
    ]


@pytest.mark.parametrize("budget", [17, 33])
def test_layers_take_turns_by_the_clock_of_each_sequence(budget: int) -> None:
    """One sequence of a batch evicts first before another: both still spread it over the layers."""
    method = SnapKV(window=4, interval=6, smooth=True)
    together = kept(method, (0, 1, 2), budget)
    for i in range(3):
        assert together[i] == kept(method, (i,), budget)[0]


@pytest.mark.parametrize("second", [TOVA(), RKV(window=3, interval=4)], ids=lambda method: method.id)
def test_a_sequence_whose_turn_has_not_come_keeps_heads_of_unlike_length(second: EvictionMethod) -> None:
    """Heads of unlike length wait for a second method that gives each the same: the batch cuts none short."""
    method = TwoPhase(at_prefill=AdaKV(base=SnapKV(window=4)), at_decode=second)
    together = kept(method, (0, 1, 2), 17)
    lengths = {len(head) for layer in together[2][0] for head in layer}
    assert len(lengths) > 1
    for i in range(3):
        assert together[i] == kept(method, (i,), 17)[0]


class Brute:
    """Weighs a cache whole whenever it may hold most: before rows leave a layer, and after each forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes, self.entries, self.cache = 0, 0, None
        self.keeps = 0
        keep = EvictingLayer.keep

        def weighed(layer: EvictingLayer, *args: Any) -> None:
            self.weigh()
            self.keeps += self.cache is not None
            keep(layer, *args)

        monkeypatch.setattr(EvictingLayer, "keep", weighed)

    def weigh(self) -> None:
        if self.cache is not None:
            self.bytes = max(self.bytes, self.cache.sequence_bytes())
            self.entries = max(self.entries, *self.cache.entries())


TRI: dict[str, Any] = {"protect_prompt": False, "sinks": 1}
METHODS = [
    SnapKV(window=4, interval=3),
    SnapKV(window=4, interval=6, smooth=True),
    RKV(window=3, interval=4),
    RaaS(page=3, alpha=0.1),
    H2O(),
    ExpectedAttention(sinks=2, future=20, interval=3),
    AdaKV(base=SnapKV(window=4), interval=5),
    TriAttention(interval=6, **TRI),
    TriAttention(interval=6, mode="per_layer_perhead", ema=0.1, **TRI),
    TriAttention(interval=9, mode="per_layer_perhead", head_budgets="concentration", **TRI),
]


def named(method: EvictionMethod) -> str:
    return "-".join([method.id, *(str(x) for x in (method.interval, getattr(method, "mode", "")) if x)])


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize("method", METHODS, ids=named)
def test_peaks_are_of_all_that_was_held_before_rows_left(
    method: EvictionMethod, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 tokens one by one on one fork, then blocks of 1 to 9 tokens on a second: one meter, one peak."""
    model, memory = helpers.model(family), None
    if method.needs_calibration:
        memory = statistics(family, tmp_path)
    cache: Any = method.encode(model, helpers.context(), memory, 17)
    meter, brute = cache.evictor.meter, Brute(monkeypatch)
    before = meter.bytes_peak, meter.entries_peak
    assert before == (cache.sequence_bytes(), max(cache.entries()))
    with method.attach(model, memory):
        for lengths in ([1] * 40, [9, 1, 4, 7, 2, 9] if not method.stepwise else [1] * 9):
            brute.cache = fork = cache.fork()
            for length in lengths:
                ids = torch.tensor([[7 * (fork.seen + i) % 200 for i in range(length)]])
                positions = torch.arange(fork.seen, fork.seen + length)[None]
                model(ids, cache=fork, position_ids=positions)
                brute.weigh()
            usage = fork.evictor.usage()
            assert usage["bytes_peak"] == max(brute.bytes, before[0])
            if not method.divides:  # where heads differ, entries are their mean
                assert usage["entries_peak"] == max(brute.entries, before[1])
    assert brute.keeps > 6


@torch.no_grad()
def test_peaks_of_a_padded_batch_count_a_sequences_share(monkeypatch: pytest.MonkeyPatch) -> None:
    method, model, brute = SnapKV(window=4, interval=5), helpers.model("qwen3"), Brute(monkeypatch)
    cache: Any = method.encode(model, CONTEXTS, None, 17)
    with method.attach(model):
        batch = QueryBatch(model, cache, QUERIES)
        before = cache.evictor.meter.bytes_peak
        brute.cache = fork = batch.cache.fork()
        columns = batch.columns
        for step in range(17):
            columns = torch.cat([columns, columns.new_ones(3, 1)], dim=1)
            token = torch.full((3, 1), 3 * step)
            batch._forward(fork, token, batch._mask(columns), batch.next_position + step, 1)
            brute.weigh()
    assert fork.evictor.usage()["bytes_peak"] == max(before, brute.bytes) and brute.keeps > 3


def test_the_fullest_moment_by_hand() -> None:
    """Two layers that hold 17 to 20 rows and evict at 21, one after another: the first does when it holds 21
    and the other 20, 41 rows in all. While 45 tokens of prompt are read, the last layer holds 45 beside 17 in
    the first. A row has keys and values of 2 heads, and int32 slots and positions, which heads still share
    while nothing has left."""
    method, model = SnapKV(window=4, interval=4), helpers.model("qwen3")
    cache: Any = method.encode(model, helpers.context(), None, 17)
    with method.attach(model):
        QueryBatch(model, cache, [[5]]).generate(30, lambda made: None)
    usage = cache.evictor.usage()
    wide = model.config.head_dim * 4
    window = 2 * (6 * 4 * wide + 4 * 4 + 4)  # the latest four queries of 6 heads, slots and marks
    row = 2 * (2 * wide + 8)
    assert usage["entries_peak"] == 21 and usage["entries_peak_prompt"] == 45
    assert usage["bytes_peak"] == 41 * row + window
    assert usage["bytes_peak_prompt"] == 62 * row - 45 * 8 + window


@torch.no_grad()
def test_a_step_that_cannot_make_a_peak_weighs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once an interval has been seen, two layers are weighed twice when rows leave, and rarely between.

    Weighing both at each of the 120 steps would make 240.
    """
    method, model, weighed = SnapKV(window=4, interval=40), helpers.model("qwen3"), []
    cache: Any = method.encode(model, helpers.context(), None, 17)
    plain = scale.weight
    monkeypatch.setattr(scale, "weight", lambda layer: weighed.append(layer) or plain(layer))
    with method.attach(model):
        for step in range(200):
            if step == 80:
                weighed.clear()
            model(torch.tensor([[step]]), cache=cache, position_ids=torch.tensor([[45 + step]]))
    assert len(weighed) < 60


@pytest.mark.parametrize("method", [SnapKV(window=4, interval=3), H2O()], ids=named)
def test_sequences_that_have_ended_count_no_more(method: EvictionMethod) -> None:
    """A batch whose sequences end after 3, 25 and 11 tokens counts as each of them alone."""
    model, limits = helpers.model("qwen3"), [3, 25, 11]

    def counted(which: Sequence[int]) -> tuple[int, int]:
        cache: Any = method.encode(model, [CONTEXTS[i] for i in which], None, 17)
        with method.attach(model):
            batch = QueryBatch(model, cache, [QUERIES[i] for i in which])
            batch.generate([limits[i] for i in which], lambda made: None)
        return cache.counters["evicted"], cache.evictor.meter.entries_peak

    alone = [counted([i]) for i in range(3)]
    evicted, peak = counted([0, 1, 2])
    assert evicted == sum(number for number, _ in alone)
    assert peak == max(entries for _, entries in alone)
