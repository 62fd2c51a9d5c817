from __future__ import annotations

from typing import Any

import pytest
import torch

import helpers
from evict import PROMPTS, Event, Reference, by_hand, each_setting, hold, top, watched
from kvexp.attention.options import Options, set_options
from kvexp.errors import UserError
from kvexp.methods.eviction.random import Random, mixed


def slow(state: int) -> int:
    """The hash in plain integers."""
    state = (state + 1) % 2**32
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ (state >> shift)) * factor % 2**32
    return state ^ (state >> 16)


def number(seed: int, layer: int, head: int, position: int) -> float:
    state = 0
    for part in (seed, layer, head, position):
        state = slow(state ^ part)
    return (state >> 8) / 2**24


def reference(budget: int, seed: int = 0, sinks: int = 0) -> Reference:
    def kept(events: list[Event]) -> list[list[list[int]]]:
        return [
            [
                top(torch.tensor([number(seed, event.place, h, p) for p in at]), at, budget, range(sinks))
                for h, at in enumerate(event.positions)
            ]
            for event in events
            if event.forward == events[-1].forward
        ]

    return kept


@each_setting
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_keeps_what_the_reference_keeps(family: str, dtype: torch.dtype) -> None:
    for prompts in (PROMPTS[:1], PROMPTS):
        for sequence in watched(Random(interval=4, seed=3), family, prompts, 12, 10, dtype):
            assert hold(sequence, reference(12, seed=3)) >= 4


def test_the_hash_is_murmur3s_finaliser() -> None:
    """Published values of the finaliser: 1 -> 0x514E28B7, 2 -> 0x30F4C306."""
    assert mixed(torch.tensor([0, 1])).tolist() == [0x514E28B7, 0x30F4C306]
    some = torch.arange(2**32 - 40, 2**32)
    assert mixed(some).tolist() == [slow(int(x)) for x in some]


def test_by_hand() -> None:
    """Numbers of seed 0 and layer 0 at the positions 0 to 5, and of all above 0.88 up to position 25.

    Head 0: 0.883, 0.058, 0.256, 0.163, 0.082, 0.949; later 0.976 at 18 and 0.934 at 23.
    Head 1: 0.124, 0.110, 0.959, 0.390, 0.718, 0.856.
    """
    step, one = (torch.ones(2, 6, 2),) * 3, (torch.ones(2, 1, 2),) * 3
    assert by_hand(Random(), [step], 2) == [[0, 5], [2, 5]]
    assert by_hand(Random(), [step], 4) == [[0, 2, 3, 5], [2, 3, 4, 5]]
    assert by_hand(Random(interval=1), [step, *[one] * 20], 4)[0] == [0, 5, 18, 23]
    assert [round(number(0, 0, 0, p), 3) for p in (0, 5, 18, 23)] == [0.883, 0.949, 0.976, 0.934]


def test_heads_layers_and_seeds_draw_on_their_own() -> None:
    draws = [
        [number(seed, layer, head, p) for p in range(50)]
        for seed in range(3)
        for layer in range(3)
        for head in range(3)
    ]
    correlations = torch.corrcoef(torch.tensor(draws)) - torch.eye(27)
    assert correlations.abs().max() < 0.6
    assert by_hand(Random(seed=1), [(torch.ones(1, 40, 2),) * 3], 9) != by_hand(
        Random(), [(torch.ones(1, 40, 2),) * 3], 9
    )


def test_every_position_is_kept_equally_often() -> None:
    """5 of 20 rows, 400 times: a position stays 100 times on average, with a deviation of 8.7."""
    counts = torch.zeros(20)
    for seed in range(100):
        step = (torch.ones(4, 20, 2),) * 3
        for kept in by_hand(Random(seed=seed), [step], 5):
            counts[kept] += 1
    assert counts.sum() == 2000 and counts.min() > 65 and counts.max() < 135


def test_chunks_do_not_change_the_draw() -> None:
    model, whole = helpers.model("llama"), held(helpers.model("llama"))
    set_options(model, Options(prefill_chunk=7))
    try:
        assert held(model) == whole
        assert held(model, Random(prefill="chunks")) == whole
    finally:
        set_options(model, Options())


def held(model: Any, method: Random | None = None) -> list[list[int]]:
    cache = (method or Random()).encode(model, helpers.context(), budget=11)
    return [layer.positions[0, h].tolist() for layer in cache.layers for h in range(2)]


def test_seeds_are_refused() -> None:
    for seed in (-1, 2**32):
        with pytest.raises(UserError, match=rf"method.seed={seed} .*: use a number from 0 to 4294967295"):
            Random(seed=seed)
