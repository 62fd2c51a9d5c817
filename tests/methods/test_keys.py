"""Queries before RoPE and at one common position are the same keys; at their own positions they are not."""

from __future__ import annotations

import pytest
import torch

import helpers
from kvexp.attention.rope import rotate
from kvexp.tasks.batch import QueryBatch

TRACES = [helpers.tokens(9, seed=s) for s in range(6)]
QUERIES = [helpers.tokens(6, seed=50 + s) for s in range(4)]
POSITION = 37


def same_entries(one, two, atol=1e-4) -> bool:
    """Whether two layers hold the same states, entry by entry."""
    return all(
        getattr(one, name).shape == getattr(two, name).shape
        and torch.allclose(getattr(one, name), getattr(two, name), rtol=0, atol=atol)
        for name in ("a", "log_z", "count")
    )


@pytest.mark.parametrize("whiten", ["none", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss", "phi3", "glm4_moe_lite"])
def test_pre_and_unified_keys_give_the_same_entries_and_answers(prepared, family, whiten):
    knobs = {"family": family, "layout": "pooled", "whiten": whiten}
    pre = prepared(TRACES, 24, key="pre", **knobs)
    unified = prepared(TRACES, 24, key="rope_unified", unified_position=POSITION, **knobs)
    for one, two in zip(pre.layers(), unified.layers(), strict=True):
        assert same_entries(one, two)
    if whiten == "none":  # whitened keys live in another space
        for layer, one in pre.memory.layers.items():
            turned = rotate(pre.model, one.keys[None], torch.full((one.keys.shape[1],), POSITION), layer)
            other = unified.memory.layers[layer].keys
            torch.testing.assert_close(turned[0], other, rtol=0, atol=1e-5)
            assert not torch.allclose(one.keys, other, atol=1e-2)
    torch.testing.assert_close(pre.logits(QUERIES), unified.logits(QUERIES), rtol=0, atol=1e-3)


def test_diagonal_whitening_tells_them_apart(prepared):
    knobs = {"layout": "pooled", "whiten": "diagonal"}
    pre = prepared(TRACES, 24, key="pre", **knobs)
    unified = prepared(TRACES, 24, key="rope_unified", unified_position=POSITION, **knobs)
    pairs = zip(pre.layers(), unified.layers(), strict=True)
    assert not all(same_entries(one, two, 1e-2) for one, two in pairs)


def test_keys_at_actual_positions_are_others(prepared):
    pre, actual = (prepared(TRACES, 24, layout="pooled", key=key) for key in ("pre", "rope_actual"))
    assert not same_entries(pre.layers()[0], actual.layers()[0], 1e-2)
    # One token at two positions has one key before RoPE, and two after it.
    again = [7, 7, 7, 7]
    pre, actual = (prepared([again], None, layout="pooled", key=key) for key in ("pre", "rope_actual"))
    assert pre.layers()[0].count.tolist() == [[4, 4, 4]] * 2
    assert actual.layers()[0].count.tolist() == [[1] * 12] * 2


@pytest.mark.parametrize(("key", "moves"), [("pre", False), ("rope_unified", False), ("rope_actual", True)])
def test_the_starting_position_matters_to_actual_positions_alone(prepared, key, moves):
    made = prepared(TRACES, 24, key=key)
    there = made.logits(QUERIES)
    assert made.cache().seen == len(made.context)
    made.memory.manifest["seen"] += 1000
    elsewhere = made.logits(QUERIES)
    assert torch.allclose(there, elsewhere, rtol=0, atol=2e-3) != moves


def test_queries_start_behind_the_prefix(prepared):
    made = prepared(TRACES, None, key="rope_actual")
    cache = made.cache()
    with made.method.attach(made.model):
        batch = QueryBatch(made.model, cache, [TRACES[0], TRACES[1][:4]])
    layer = batch.cache.layers[0]
    first = len(made.context)
    assert layer.positions[0].tolist() == list(range(first, first + 9))
    assert layer.positions[1, 5:].tolist() == list(range(first, first + 4)), "left padding moves no position"
