"""What shifted keys and values do to attention: what cancels, and how far the output can move.

For one query with logits z and weights p = softmax(z) over rows v, and p', v' after a change:

    |o' - o| <= max |v' - v| + |p' - p|_1 max |v|,    |p' - p|_1 <= max |z' - z|

The constant of the second inequality is 1. A half, which is right when both sides are measured in the same
norm, is too small between these two: two logits break it. (On "AgentKVShift", 2026, arXiv 2607.21604.)
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import helpers
from kvexp.attention.local import attend
from kvexp.attention.rerotate import Rotary

SCALE = 0.25
SEEDS, SIZES = st.integers(0, 10**6), st.floats(1e-3, 30.0)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attended(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Our attention for queries [T, D] over rows [n, D], [T, D]."""
    output, _ = attend(query[None, None], keys[None, None], values[None, None], SCALE, backend="reference")
    return output[0, 0]


@pytest.mark.parametrize("t", [1e-3, 0.1, 1.0, 1.9])
def test_two_logits_need_a_constant_of_one(t: float) -> None:
    """From (0, 0) to (t, -t) weights move by tanh(t) in all: more than t / 2, and t in the limit."""
    change = (torch.tensor([t, -t], dtype=torch.float64).softmax(0) - 0.5).abs()
    assert float(change.sum()) == pytest.approx(math.tanh(t))
    assert t / 2 < float(change.sum()) < t
    assert float(change.max()) == pytest.approx(math.tanh(t) / 2) and float(change.max()) < t / 2
    # The same in attention: keys move by t along the query, values are 1 and -1.
    query = torch.tensor([[1.0 / SCALE]], dtype=torch.float64)
    keys = torch.tensor([[t], [-t]], dtype=torch.float64)
    values = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    moved = attended(query, keys, values) - attended(query, torch.zeros_like(keys), values)
    assert float(moved) == pytest.approx(math.tanh(t)) and t / 2 < float(moved) < t


def test_no_constant_below_one_will_do() -> None:
    assert math.tanh(1e-3) / 1e-3 > 1 - 1e-6


@settings(max_examples=200, deadline=None)
@given(n=st.integers(1, 12), seed=SEEDS, spread=SIZES, change=SIZES)
def test_weights_move_by_no_more_than_the_largest_change_of_a_logit(
    n: int, seed: int, spread: float, change: float
) -> None:
    before = random(n, seed=seed) * spread
    after = before + random(n, seed=seed + 1).sign() * change  # signs alone are the worst of this size
    moved = (after.softmax(0) - before.softmax(0)).abs().sum()
    assert float(moved) <= min(2.0, float((after - before).abs().max())) + 1e-12


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 12), seed=SEEDS, spread=SIZES, keys_by=SIZES, values_by=SIZES)
def test_outputs_stay_within_the_bound(
    n: int, seed: int, spread: float, keys_by: float, values_by: float
) -> None:
    query, keys, values = (random(m, 4, seed=seed + i) * spread for i, m in enumerate((3, n, n)))
    off_k, off_v = (random(n, 4, seed=seed + i) * by for i, by in ((3, keys_by), (4, values_by)))
    moved = (attended(query, keys + off_k, values + off_v) - attended(query, keys, values)).norm(dim=-1)
    logits = SCALE * query.norm(dim=-1) * off_k.norm(dim=-1).max()
    bound = off_v.norm(dim=-1).max() + logits * values.norm(dim=-1).max()
    assert (moved <= bound * (1 + 1e-9)).all()


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 12), seed=SEEDS, size=SIZES)
def test_a_shift_of_all_keys_cancels_and_one_of_all_values_arrives_whole(
    n: int, seed: int, size: float
) -> None:
    query, keys, values = (random(m, 4, seed=seed + i) for i, m in enumerate((3, n, n)))
    shift = random(4, seed=seed + 3) * size
    before = attended(query, keys, values)
    torch.testing.assert_close(attended(query, keys + shift, values), before, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(attended(query, keys, values + shift), before + shift, atol=1e-9, rtol=1e-9)


def test_a_shift_of_one_unit_moves_weight_between_units_and_not_within() -> None:
    query, keys = random(3, 4, seed=1), random(7, 4, seed=2)
    moved = keys.clone()
    moved[2:5] += random(4, seed=3)
    before, after = ((SCALE * query @ x.T).softmax(-1) for x in (keys, moved))
    unit, rest = slice(2, 5), [0, 1, 5, 6]
    for part in (unit, rest):
        within = [x[:, part] / x[:, part].sum(-1, keepdim=True) for x in (before, after)]
        torch.testing.assert_close(*within)
    assert (before[:, unit].sum(-1) - after[:, unit].sum(-1)).abs().min() > 1e-3


def test_a_shift_of_all_keys_before_rotation_does_not_cancel() -> None:
    """Turned by each row's own position it is another vector in each row."""
    rotary, positions = Rotary(helpers.model("llama", torch.float64)), torch.arange(6)
    angles = rotary.angles(0, positions)
    assert angles is not None
    dim = helpers.model("llama").config.head_dim
    query, keys, values = (random(m, dim, seed=i) for i, m in enumerate((1, 6, 6)))
    shift = angles.turn(random(1, dim, seed=3).expand(6, dim))
    moved = attended(query, keys + shift, values) - attended(query, keys, values)
    assert float(moved.norm()) > 1e-2
