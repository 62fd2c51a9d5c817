"""Dense layers whose batch widens, repeats, shrinks or follows beams."""

from __future__ import annotations

import pytest
import torch

from history import History, padded
from kvexp.cache.dense import DenseLayer


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("forked", [False, True])
def test_a_context_of_one_serves_a_batch(window: int | None, forked: bool) -> None:
    columns = padded([0, 2, 1], before=7, query=4, after=2)
    history = History(columns, window)
    for x in (history.keys, history.values):
        x[1:, :, :7] = x[:1, :, :7]
    layer = DenseLayer(window=window)
    for count in (5, 2):
        history.feed(layer, count, batch=1)
    layer = layer.fork() if forked else layer
    for count in (4, 1, 1):
        history.check(layer, count)
    assert layer.keys.shape[0] == layer.positions.shape[0] == 3


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("forks", [(), (0,), (1,), (0, 1)])
def test_following_beams_moves_own_and_shared_rows(window: int | None, forks: tuple[int, ...]) -> None:
    columns = padded([0, 2, 1], before=5, query=4, after=3)
    history, layer = History(columns, window), DenseLayer(window=window)
    for step, count in enumerate((5, 4, 1)):
        history.feed(layer, count)
        layer = layer.fork() if step in forks else layer
    order = torch.tensor([2, 0, 0])
    layer.reorder_cache(order)
    for name in ("columns", "keys", "values", "queries", "positions"):
        past = getattr(history, name)
        setattr(history, name, past[order])
    history.check(layer, 1)
    history.check(layer.fork(), 1)


@pytest.mark.parametrize("forks", [(), (0,), (1,), (0, 1)])
def test_repeating_and_choosing_sequences(forks: tuple[int, ...]) -> None:
    history, layer = History(padded([0, 1], before=5, query=3, after=3)), DenseLayer()
    for step, count in enumerate((5, 3)):
        history.feed(layer, count)
        layer = layer.fork() if step in forks else layer
    layer.batch_repeat_interleave(2)
    for chosen in ([0, 0, 1, 1], [3, 1]):
        if len(chosen) == 2:
            layer.batch_select_indices(torch.tensor(chosen))
        for name in ("columns", "keys", "values", "queries", "positions"):
            setattr(history, name, getattr(history, name)[torch.tensor(chosen)])
        history.check(layer, 1)


def test_what_serves_any_batch_is_not_repeated() -> None:
    history, layer = History(torch.ones(1, 9, dtype=torch.bool)), DenseLayer()
    history.feed(layer, 5)
    fork, held = layer.fork(), layer.keys.data_ptr()
    for each in (layer, fork):
        each.batch_repeat_interleave(3)
        each.reorder_cache(torch.tensor([2, 0, 1]))
    assert layer.keys.shape[0] == 1 and layer.keys.data_ptr() == held
    assert fork.sources[0].tensors()[0].data_ptr() == held
