from __future__ import annotations

from fractions import Fraction

import pytest
import torch

import helpers
from evict import PROMPTS, Event, Reference, by_hand, each_setting, hold, top, watched
from kvexp.budget import Budget
from kvexp.errors import UserError
from kvexp.methods.eviction.pyramidkv import PyramidKV, schedule
from kvexp.methods.eviction.snapkv import SnapKV
from snap import latest, snap_scores, window_rows

METHOD = PyramidKV(window=4, kernel=3, interval=4, beta=5)


def layer_budget(method: PyramidKV, event: Event, budget: int) -> int:
    """The paper's line through all layers of `event`, rounded so that the sum is right."""
    past, seen = budget - method.window, event.upcoming
    if seen <= budget or past < method.beta:
        return budget
    first = min(2 * past - Fraction(past, method.beta), Fraction(seen - method.window))
    last = 2 * past - first
    steps = max(1, event.n_layers - 1)
    line = [first - layer * (first - last) / steps for layer in range(event.n_layers)]
    floors = [x.numerator // x.denominator for x in line]
    short = event.n_layers * past - sum(floors)
    largest = sorted(range(event.n_layers), key=lambda i: (floors[i] - line[i], i))[:short]
    return method.window + floors[event.place] + (event.place in largest)


def reference(budget: int, method: PyramidKV) -> Reference:
    def kept(events: list[Event]) -> list[list[list[int]]]:
        found = []
        for event in latest(events):
            rows, window = layer_budget(method, event, budget), window_rows(event, method)
            scores = snap_scores(events, event, method)
            heads = zip(scores, event.positions, strict=True)
            found.append([top(torch.tensor(head), held, rows, window) for head, held in heads])
        return found

    return kept


@each_setting
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_keeps_what_the_reference_keeps(family: str, dtype: torch.dtype) -> None:
    for prompts in (PROMPTS[:1], PROMPTS):
        events = watched(METHOD, family, prompts, 14, 10, dtype)
        assert len(events) == len(prompts)
        for sequence in events:
            assert hold(sequence, reference(14, METHOD)) >= 2 * sequence[-1].n_layers
            _holds_its_budget(sequence, 14)


def _holds_its_budget(sequence: list[Event], budget: int) -> None:
    for forward in {event.forward for event in sequence}:
        layers = [event for event in sequence if event.forward == forward]
        held = [len(event.kept[0]) for event in layers]
        assert sum(held) <= len(layers) * (budget + 3)  # up to interval - 1 more
        if layers[0].reading:
            assert sum(held) == len(layers) * budget
            assert held == sorted(held, reverse=True) and held[0] > held[-1]


def test_a_prompt_that_the_first_layer_holds_whole() -> None:
    """22 tokens, window 4: the first layer wants 2 * 12 - 12 / 12 = 23 rows beside it and there are 17.

    So the last gets 24 - 17 = 7 and the middle one 12; the first layer evicts nothing until decoding.
    """
    method = PyramidKV(window=4, kernel=3, beta=12)
    (events,) = watched(method, "llama", [PROMPTS[0][:22]], 16, 0)
    assert [len(event.kept[0]) for event in events if event.reading] == [21, 16, 11]
    hold(events, reference(16, method))


def test_while_decoding_layers_follow_the_tokens_seen() -> None:
    """22 tokens in layers of 21, 16 and 11 rows; each token more moves a row from the last to the first."""
    method = PyramidKV(window=4, kernel=3, beta=12, interval=1)
    (events,) = watched(method, "llama", [PROMPTS[0][:22]], 16, 9)
    held = [[len(e.kept[0]) for e in events if e.forward == f] for f in range(10)]
    assert held[:4] == [[21, 16, 11], [22, 16, 10], [23, 16, 9], [24, 16, 8]]
    assert held[6:] == [[27, 16, 5]] * 4  # 23 + 4, 12 + 4, 1 + 4
    hold(events, reference(16, method))


@pytest.mark.parametrize("n_layers", [1, 2, 3, 5, 28, 36])
@pytest.mark.parametrize("window", [1, 8, 32])
@pytest.mark.parametrize("beta", [1, 7, 20])
def test_budgets_sum_exactly_and_never_rise(n_layers: int, window: int, beta: int) -> None:
    method = PyramidKV(window=window, beta=beta)
    for rows in (window + 1, 40, 61, 128, 511, 2048):
        if rows <= window:
            continue
        for length in (rows - 1, rows, rows + 1, rows + 17, 2 * rows - 3, 3 * rows, 9999):
            layers = [method.layer_rows(layer, n_layers, rows, length) for layer in range(n_layers)]
            assert sum(layers) == n_layers * rows
            assert layers == sorted(layers, reverse=True)
            assert all(window < n <= max(length, rows) for n in layers)


def test_schedule_by_hand() -> None:
    """10 rows, beta 5: the last layer has 2, the first 18; of 3 the middle one 10, of 4 12.67 and 7.33."""
    assert schedule(10, 20, 3, 5) == (18, 10, 2)
    assert schedule(10, 20, 4, 5) == (18, 13, 7, 2)
    assert schedule(10, 15, 3, 5) == (15, 10, 5)  # 15 rows are all there is
    assert schedule(10, 20, 1, 5) == (10,)
    assert schedule(3, 6, 2, 2) == (5, 1)  # 4.5 and 1.5: the row goes to the lower layer


def test_a_budget_without_a_schedule_is_flat() -> None:
    """Below beta rows beside the window the last layer would have none: every layer then holds the budget."""
    method = PyramidKV(window=8, beta=20)
    assert [method.layer_rows(layer, 4, 27, 900) for layer in range(4)] == [27] * 4
    assert [method.layer_rows(layer, 4, 28, 900) for layer in (0, 3)] == [8 + 39, 8 + 1]


def test_flat_is_snapkv() -> None:
    flat, snap = (
        [event.kept for event in watched(method, "llama", PROMPTS, 14, 3)[1]]
        for method in (PyramidKV(window=4, interval=2, beta=1), SnapKV(window=4, interval=2))
    )
    assert flat == snap


def test_within_a_layer_by_hand() -> None:
    """One layer alone has the budget: weights 5 1 2 8 | 1 3 keep rows 3 and 0 beside the window."""
    keys = torch.tensor([5.0, 1.0, 2.0, 8.0, 1.0, 3.0]).log()[None, :, None]
    step = torch.ones_like(keys), keys, keys
    assert by_hand(PyramidKV(window=2, kernel=1, beta=2), [step], 4) == [[0, 3, 4, 5]]


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text"])
def test_sliding_layers_have_no_share(family: str) -> None:
    """Both have one layer that sees everything: it holds the budget, whatever its depth."""
    cache = METHOD.encode(helpers.model(family), helpers.context(), budget=14)
    assert cache.entries() == [14]


def test_knobs_that_make_no_sense() -> None:
    with pytest.raises(UserError, match="beta=0 would make deep layers hold most: use 1"):
        PyramidKV(beta=0)
    with pytest.raises(UserError, match="use budget=33 or more"):
        PyramidKV().check_budget(Budget(32))
