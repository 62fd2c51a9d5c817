from __future__ import annotations

from typing import Any

import pytest
import torch

import helpers
from evict import PROMPTS, Event, Reference, _rows, by_hand, each_setting, hold, top, watched
from kvexp.attention.options import Options, set_options
from kvexp.budget import Budget
from kvexp.errors import UserError
from kvexp.methods.eviction.snapkv import SnapKV
from kvexp.tasks.batch import QueryBatch
from snap import latest, snap_scores, window_rows


def reference(budget: int, method: SnapKV) -> Reference:
    def kept(events: list[Event]) -> list[list[list[int]]]:
        found = []
        for event in latest(events):
            always = [*range(method.sinks), *window_rows(event, method)]
            scores = snap_scores(events, event, method)
            heads = zip(scores, event.positions, strict=True)
            found.append([top(torch.tensor(head), rows, budget, always) for head, rows in heads])
        return found

    return kept


@each_setting
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_keeps_what_the_reference_keeps(family: str, dtype: torch.dtype) -> None:
    method = SnapKV(window=5, kernel=3, interval=4)
    for prompts in (PROMPTS[:1], PROMPTS):
        events = watched(method, family, prompts, 14, 10, dtype)
        assert len(events) == len(prompts)
        for sequence in events:
            layers = sequence[-1].n_layers
            assert hold(sequence, reference(14, method)) == 3 * layers  # the prompt's end, steps 4 and 8


VARIANTS: dict[str, SnapKV] = {
    "class, kvpress": SnapKV(window=6, kernel=5, pool="avg"),
    "Ada-KV": SnapKV(window=6, merge="attention"),
    "R-KV": SnapKV(
        window=3, softmax="past", merge="logits", group="max", interval=8, trigger="length", kernel=5
    ),
    "mean of logits": SnapKV(window=3, softmax="all", merge="logits", interval=3),
    "largest head": SnapKV(window=4, group="max", softmax="past", interval=1),
    "largest head before pooling": SnapKV(window=4, group="max", merge="attention", pool="avg", interval=5),
    "sinks": SnapKV(window=4, sinks=3, kernel=1, interval=2),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_keep_what_the_reference_keeps(name: str) -> None:
    method = VARIANTS[name]
    for sequence in watched(method, "llama", PROMPTS, 13, 9):
        layers = sequence[-1].n_layers
        assert hold(sequence, reference(13, method)) >= layers * (2 if method.interval else 1)


def test_variants_differ() -> None:
    sets = set()
    for method in VARIANTS.values():
        events = watched(method, "llama", PROMPTS[:1], 13, 0)[0]
        sets.add(str([event.kept for event in events if event.reading]))
    assert len(sets) == len(VARIANTS)


def test_chunks_are_compressed_one_by_one() -> None:
    method, model = SnapKV(window=5, kernel=3, prefill="chunks"), helpers.model("llama", torch.float32)
    set_options(model, Options(prefill_chunk=7))
    try:
        for sequence in watched(method, "llama", PROMPTS, 14, 0):
            assert hold(sequence, reference(14, method)) >= 3 * sequence[-1].n_layers
    finally:
        set_options(model, Options())


@pytest.mark.parametrize("length", [1, 3, 5, 6])
def test_contexts_up_to_the_window_pass_through(length: int) -> None:
    """Fewer tokens than the window, as many, one more: nothing leaves until decoding fills the budget."""
    method = SnapKV(window=5, query_aware=True, interval=1)
    (events,) = watched(method, "llama", [PROMPTS[0][:length]], 6, 4)
    for event in events:
        assert len(event.kept[0]) == min(6, event.upcoming)
        assert event.kept[0][-5:] == [*range(max(0, event.upcoming - 5), event.upcoming)]
    assert any(event.evicts for event in events) == (length + 3 > 6)  # the last new token is not read


def test_pads_between_context_and_queries_are_not_read() -> None:
    method, model = SnapKV(window=4, kernel=5, query_aware=True, interval=2), helpers.model("llama")
    cache = method.encode(model, helpers.context(), budget=17)

    def answers(queries: Any) -> tuple[QueryBatch, list[list[int]]]:
        batch = QueryBatch(model, cache, queries)
        return batch, batch.generate(8, lambda made: None)[0]

    with method.attach(model):
        together, made = answers(helpers.QUERIES)
        for row, query in enumerate(helpers.QUERIES):
            alone, mine = answers([query])
            assert made[row] == mine[0]
            torch.testing.assert_close(together.logits[row], alone.logits[0], atol=1e-4, rtol=0)
            for ours, theirs in zip(together.cache.layers, alone.cache.layers, strict=True):
                for head in range(2):
                    kept = _rows([ours.held()], row, head)[2]
                    assert kept == _rows([theirs.held()], 0, head)[2]
                    assert len(kept) == 17


LOGS = [5.0, 1.0, 2.0, 8.0, 1.0, 3.0]


def step(logs: list[float]) -> Any:
    """Keys that the query (1) sees with weights proportional to `logs`; every query is (1)."""
    keys = torch.tensor(logs).log()[None, :, None]
    return torch.ones_like(keys), keys, keys


def test_by_hand() -> None:
    """Weights 5 1 2 8 | 1 3, window of 2. Of the past, the largest is row 3, then row 0.

    Pooled over 3 rows by maximum the past is 5 5 8 8: rows 2 and 3, and of the equal 0 and 1 the first.
    By average it is 6 8 11 10 (thirds): rows 2, 3, then 1. The rows of the window (4, 5) always stay.
    """
    assert by_hand(SnapKV(window=2, kernel=1), [step(LOGS)], 4) == [[0, 3, 4, 5]]
    assert by_hand(SnapKV(window=2, kernel=3), [step(LOGS)], 4) == [[2, 3, 4, 5]]
    assert by_hand(SnapKV(window=2, kernel=3), [step(LOGS)], 5) == [[0, 2, 3, 4, 5]]
    assert by_hand(SnapKV(window=2, kernel=3, pool="avg"), [step(LOGS)], 5) == [[1, 2, 3, 4, 5]]


def test_by_hand_grouped_queries() -> None:
    """Two query heads share a KV head; the window is the last row.

    Head 0 gives the rows 6 1 1 | 1 of 9, head 1 gives 1 3 4 | 1 of 9. The mean of both is 7 4 5 of 18, the
    maximum 6 3 4 of 9, and logits average to the logarithms of sqrt 6, sqrt 3, sqrt 4: always row 0, then 2.
    """
    first, second = [6.0, 1.0, 1.0, 1.0], [1.0, 3.0, 4.0, 1.0]
    keys = torch.tensor([first, second]).log().T[None]  # [1, 4, 2]
    queries = torch.eye(2)[:, None].expand(2, 4, 2)
    for merge in ("scores", "attention", "logits"):
        for group in ("mean", "max"):
            method = SnapKV(window=1, kernel=1, merge=merge, group=group)  # type: ignore[arg-type]
            assert by_hand(method, [(queries, keys, keys)], 2) == [[0, 3]]
            assert by_hand(method, [(queries, keys, keys)], 3) == [[0, 2, 3]]


def test_by_hand_where_heads_join_matters() -> None:
    """Past rows 0-3 get 8 0 0 2 of ten from head 0, 0 0 6 4 of ten from head 1; the window's row gets none.

    Pooled by maximum of 3, the heads give 8 8 2 2 and 0 6 6 6: on average row 1 is best (7), then 0, 2 and 3
    (4). The attention is 4 0 3 3 on average, and pooled 4 4 3 3: row 0 is best.
    """
    tiny = 1e-9
    heads = torch.tensor([[8.0, tiny, tiny, 2.0, tiny], [tiny, tiny, 6.0, 4.0, tiny]])
    keys = heads.log().T[None]
    queries = torch.eye(2)[:, None].expand(2, 5, 2)
    assert by_hand(SnapKV(window=1, kernel=3), [(queries, keys, keys)], 2) == [[1, 4]]
    assert by_hand(SnapKV(window=1, kernel=3, merge="attention"), [(queries, keys, keys)], 2) == [[0, 4]]


def test_by_hand_softmax_over_the_past_alone() -> None:
    """Window rows 2 and 3; of the past, query 2 prefers row 1 a little, query 3 row 0 strongly.

    Query 3 spends nearly all on its own row: over all rows it counts for little, and row 1 wins (weights of
    query 2: 2 3 of 6; of query 3: 4 1 of 1000 and more). Over the past alone row 0 wins: 2/5 + 4/5 against
    3/5 + 1/5.
    """
    queries = torch.tensor([[[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    keys = torch.tensor([[[2.0, 4.0], [3.0, 1.0], [1.0, 1.0], [1.0, 1000.0]]]).log()
    step = queries, keys, keys
    assert by_hand(SnapKV(window=2, kernel=1), [step], 3) == [[1, 2, 3]]
    assert by_hand(SnapKV(window=2, kernel=1, softmax="past"), [step], 3) == [[0, 2, 3]]


def test_the_window_slides_while_decoding() -> None:
    """Weights 5 1 2 8 | 1 3 of the prompt; a token of weight 9 pushes row 4 (weight 1) out of the window."""
    one = step([9.0])
    assert by_hand(SnapKV(window=2, kernel=1, interval=1), [step(LOGS), one], 4) == [[0, 3, 5, 6]]
    two = step([0.5])
    assert by_hand(SnapKV(window=1, kernel=1, interval=1), [step(LOGS), one, two], 3) == [[3, 6, 7]]


def test_a_protected_prompt_leaves_room_for_the_window() -> None:
    """6 rows of prompt fit beside a window of 2 into 9, not into 8: then the window's rows come first."""
    method = SnapKV(window=2, kernel=1, interval=1, protect_prompt=True)
    steps = [step(LOGS), *(step([x]) for x in (1.0, 2.0, 0.1, 0.1))]
    assert by_hand(method, steps, 9) == [[0, 1, 2, 3, 4, 5, 7, 8, 9]]
    assert by_hand(method, steps, 8)[0][-2:] == [8, 9]


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"window": 0}, "window=0 holds no query: use 1 or more"),
        ({"kernel": 4}, "kernel=4 has no middle: use an odd number"),
        ({"kernel": 0}, "kernel=0 has no middle"),
        ({"sinks": -1}, "sinks=-1 is no number of rows"),
    ],
)
def test_knobs_that_make_no_sense(knobs: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        SnapKV(**knobs)


def test_smallest_budget() -> None:
    SnapKV(window=8, sinks=4, recent=3).check_budget(Budget(13))
    with pytest.raises(UserError, match="use budget=13 or more"):
        SnapKV(window=8, sinks=4, recent=3).check_budget(Budget(12))
    with pytest.raises(UserError, match="use budget=15 or more"):
        SnapKV(window=8, sinks=4, recent=10).check_budget(Budget(14))
