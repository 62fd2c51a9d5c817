"""Forks that write behind the rows of a context."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import helpers
import kvexp
from helpers import plain_logits, tokens
from kvexp.cache import dense
from kvexp.cache.dense import DenseLayer
from kvexp.cache.room import SLACK
from kvexp.tasks.batch import QueryBatch

CONTEXT = tokens(12, seed=3)


def rows(n: int, seed: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 2, n, 4, generator=torch.Generator().manual_seed(seed))


def fed(layer: DenseLayer, n: int, seed: int, batch: int = 1) -> DenseLayer:
    layer.update(rows(n, seed, batch), rows(n, -seed, batch), kwargs={})
    return layer


def context() -> DenseLayer:
    """Five rows, with room for more."""
    return fed(fed(DenseLayer(), 4, 1), 1, 2)


def place(layer: DenseLayer) -> int:
    return layer.keys.untyped_storage().data_ptr()


def test_one_fork_at_a_time_writes_behind_the_context() -> None:
    parent = context()
    before = parent.keys.clone()
    first, second = fed(parent.fork(), 2, 3), fed(parent.fork(), 2, 4)
    assert place(first) == place(parent) != place(second)
    fed(first, 1, 5), fed(second, 1, 6)
    assert torch.equal(first.keys, torch.cat([rows(2, 3), rows(1, 5)], dim=2))
    assert torch.equal(second.keys, torch.cat([rows(2, 4), rows(1, 6)], dim=2))
    assert torch.equal(parent.keys, before)
    del first
    third = fed(parent.fork(), 2, 7)
    assert place(third) == place(parent) and torch.equal(third.keys, rows(2, 7))


def test_rows_stay_while_a_fork_of_a_fork_stands_on_them() -> None:
    parent = context()
    first = fed(parent.fork(), 2, 3)
    inner = first.fork()
    del first
    other = fed(parent.fork(), 3, 4)
    assert place(other) != place(parent)
    fed(inner, 1, 5)
    assert place(inner) == place(parent)
    assert torch.equal(inner.sources[1].tensors()[0], rows(2, 3)) and torch.equal(inner.keys, rows(1, 5))
    assert torch.equal(other.keys, rows(3, 4))


def test_a_parent_that_goes_on_leaves_its_forks_alone() -> None:
    parent = context()
    fork = fed(parent.fork(), 2, 3)
    fed(parent, 2, 4)
    assert torch.equal(fork.keys, rows(2, 3))
    assert torch.equal(parent.keys, torch.cat([rows(4, 1), rows(1, 2), rows(2, 4)], dim=2))


def test_a_fork_that_fills_the_room_moves_out() -> None:
    parent = context()
    fork = fed(parent.fork(), SLACK - 1, 3)
    assert place(fork) == place(parent)
    fed(fork, 2, 4)
    assert place(fork) != place(parent) and fork.rows == SLACK + 1
    assert torch.equal(fork.keys, torch.cat([rows(SLACK - 1, 3), rows(2, 4)], dim=2))


def test_a_batch_takes_no_room_of_one_sequence() -> None:
    parent = context()
    assert place(fed(parent.fork(), 2, 3, batch=2)) != place(parent)


def test_reordered_sequences_take_no_room() -> None:
    parent = fed(fed(DenseLayer(), 4, 1, batch=2), 1, 2, batch=2)
    fork = parent.fork()
    fork.batch_select_indices(torch.tensor([1, 0]))
    fed(fork, 1, 3, batch=2)
    assert place(fork) != place(parent)
    assert torch.equal(fork.sources[0].tensors()[0], parent.keys.flip(0))


def test_positions_are_put_down_when_somebody_asks() -> None:
    layer = context()
    assert (layer.slots.tolist(), layer.positions.tolist()) == ([0, 1, 2, 3, 4], [[0, 1, 2, 3, 4]])
    at = {"position_ids": torch.tensor([[7], [9]])}
    layer = fed(DenseLayer(), 2, 1, batch=2)
    layer.update(rows(1, 3, 2), rows(1, 4, 2), kwargs=at)
    layer.update(rows(1, 5, 2), rows(1, 6, 2), kwargs={"position_ids": at["position_ids"] + 1})
    assert layer.positions.tolist() == [[0, 1, 7, 8], [0, 1, 9, 10]]
    assert layer.slots.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text", "deepseek_v3"])
@pytest.mark.parametrize("name", ["full", "keep_all"])
def test_tokens_attend_to_context_and_own_rows_as_one(family: str, name: str) -> None:
    model, method, more = helpers.model(family), kvexp.method(name), tokens(6, seed=8)
    with torch.no_grad():
        cache = method.encode(model, CONTEXT)
        with method.attach(model):
            model(torch.tensor([[5]]), cache=cache)  # a row that makes room for others
            batch = QueryBatch(model, cache, [more[:2]])
            fork = batch.cache.fork()
            found = [
                model(torch.tensor([[token]]), cache=fork, position_ids=torch.tensor([[15 + at]])).logits[0]
                for at, token in enumerate(more[2:])
            ]
    expected = plain_logits(model, [*CONTEXT, 5, *more])[-4:]
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["full", "snapkv"])
def test_a_step_of_decoding_merges_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = helpers.model("llama")
    method = kvexp.method(name)
    cache = method.encode(model, tokens(80, seed=3), budget=40)
    with method.attach(model):
        if name == "full":
            model(torch.tensor([[5]]), cache=cache)
        batch = QueryBatch(model, cache, [tokens(2, seed=8)])
        expected = batch.generate(1, lambda made: None)

        def refuse(*_: Any) -> None:
            raise AssertionError("states were merged")

        monkeypatch.setattr(dense, "merge_states", refuse)
        assert batch.generate(8, lambda made: None)[0][0][:1] == expected[0][0]


def test_rows_that_stay_in_place_leave_room_to_forks() -> None:
    model, method = helpers.model("llama"), kvexp.method("snapkv")
    cache = method.encode(model, tokens(80, seed=3), budget=40)
    with method.attach(model), torch.no_grad():
        fork = cache.fork()
        model(torch.tensor([[5]]), cache=fork)
    for layer, parent in zip(fork.layers, cache.layers, strict=True):
        assert (parent.rows, layer.rows) == (40, 1) and place(layer) == place(parent)


@pytest.mark.parametrize("name", ["snapkv", "streaming_llm"])
def test_a_fork_that_is_gone_gives_its_room_back_at_once(name: str) -> None:
    model, method = helpers.model("llama"), kvexp.method(name, **({"interval": None} if "_" in name else {}))
    cache = method.encode(model, tokens(80, seed=3), budget=40)
    gc.disable()
    try:
        with method.attach(model), torch.no_grad():
            for token in (5, 6):
                fork = cache.fork()
                model(torch.tensor([[token]]), cache=fork)
                assert place(fork.layers[0]) == place(cache.layers[0])
                del fork
    finally:
        gc.enable()
