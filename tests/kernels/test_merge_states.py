"""Merging attention states equals one softmax over the union of the keys."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvexp_kernels.merge_states import merge_many, merge_states


def attend(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over `scores [..., S]` and `values [..., S, Dv]`, the slow way."""
    return (torch.softmax(scores, -1).unsqueeze(-1) * values).sum(-2), torch.logsumexp(scores, -1)


def problem(seed: int, spread: float, sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Scores and values of disjoint key sets, float64, for a batch of 3 x 2 queries."""
    g = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(3, 2, n, generator=g, dtype=torch.float64) * spread,
            torch.randn(3, 2, n, 5, generator=g, dtype=torch.float64),
        )
        for n in sizes
    ]


sizes3 = st.tuples(*[st.integers(1, 6)] * 3)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.1, 1.0, 30.0, 3000.0]), sizes=sizes3)
def test_equals_joint_softmax_in_any_grouping(seed, spread, sizes):
    parts = problem(seed, spread, sizes)
    joint_a, joint_s = attend(torch.cat([p[0] for p in parts], -1), torch.cat([p[1] for p in parts], -2))
    one, two, three = (attend(*p) for p in parts)
    left = merge_states(*merge_states(*one, *two), *three)
    right = merge_states(*one, *merge_states(*two, *three))
    swapped = merge_states(*three, *merge_states(*two, *one))
    many = merge_many(torch.stack([one[0], two[0], three[0]]), torch.stack([one[1], two[1], three[1]]))
    for a, s in (left, right, swapped, many):
        torch.testing.assert_close(a, joint_a, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(s, joint_s, rtol=1e-12, atol=1e-12)


def test_hand_computed():
    a1, a2 = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    a, s = merge_states(a1, torch.tensor(math.log(3.0)), a2, torch.tensor(0.0))
    torch.testing.assert_close(a, torch.tensor([0.75, 0.25]))
    torch.testing.assert_close(s, torch.tensor(math.log(4.0)))


@pytest.mark.parametrize("poison", [0.0, float("nan"), float("inf")])
def test_an_empty_side_adds_nothing(poison):
    full, score = torch.tensor([[2.0, -3.0]]), torch.tensor([1.5])
    empty, nothing = torch.full((1, 2), poison), torch.tensor([-math.inf])
    for a, s in (
        merge_states(full, score, empty, nothing),
        merge_states(empty, nothing, full, score),
        merge_many(torch.stack([empty, full]), torch.stack([nothing, score])),
    ):
        assert torch.equal(a, full) and torch.equal(s, score)
    for a, s in (
        merge_states(empty, nothing, empty, nothing),
        merge_many(torch.stack([empty, empty]), torch.stack([nothing, nothing])),
    ):
        assert torch.equal(a, torch.zeros(1, 2)) and torch.equal(s, nothing)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype):
    g = torch.Generator().manual_seed(0)
    a1, a2 = torch.randn(4, 8, generator=g).to(dtype), torch.randn(4, 8, generator=g).to(dtype)
    s1, s2 = torch.randn(4, generator=g) * 100, torch.randn(4, generator=g) * 100
    a, s = merge_states(a1, s1, a2, s2)
    want, want_s = merge_states(a1.double(), s1.double(), a2.double(), s2.double())
    assert a.dtype == dtype and s.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    step = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-6
    torch.testing.assert_close(a.double(), want, rtol=2 * step, atol=2 * step)
    torch.testing.assert_close(s.double(), want_s, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_extreme_scores_stay_finite(size):
    a, s = merge_states(torch.ones(2), torch.tensor(size), torch.zeros(2), torch.tensor(size - 1.0))
    assert torch.isfinite(a).all() and torch.isfinite(s)
    torch.testing.assert_close(a, torch.full((2,), 1 / (1 + math.exp(-1))))


def test_shapes_broadcast():
    a, s = merge_states(torch.ones(2, 1, 4), torch.zeros(2, 1), torch.zeros(3, 4), torch.zeros(3))
    assert a.shape == (2, 3, 4) and s.shape == (2, 3)
    assert torch.equal(a, torch.full((2, 3, 4), 0.5))
