"""Streamed ridge regression equals its closed form on all data."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvexp.stats.ridge import RidgeRegression


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), cut=st.integers(1, 40), ridge=st.sampled_from([0.01, 0.1, 10.0]))
def test_equals_the_augmented_least_squares_problem(seed, cut, ridge):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(40, 5, generator=g, dtype=torch.float64) * torch.tensor([1, 2, 3, 0.1, 10])
    y = torch.randn(40, 3, generator=g, dtype=torch.float64)
    whole, left, right = (RidgeRegression(5, 3) for _ in range(3))
    whole.add(x, y)
    left.add(x[:cut], y[:cut])
    right.add(x[cut:], y[cut:])
    left.merge(right)
    # |XW - Y|^2 + r |W|^2 is plain least squares with sqrt(r) I under X and zeros under Y.
    root = (ridge * x.square().sum(0).mean()).sqrt()
    rows = torch.cat([x, root * torch.eye(5, dtype=torch.float64)])
    want = torch.linalg.lstsq(rows, torch.cat([y, torch.zeros(5, 3, dtype=torch.float64)])).solution
    for fit in (whole, left):
        torch.testing.assert_close(fit.solve(ridge), want, rtol=1e-9, atol=1e-9)


def test_recovers_a_linear_map_and_shrinks_it_by_hand():
    fit = RidgeRegression(1, 1)
    fit.add(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [6.0]]))
    assert fit.solve(0).item() == 3.0
    assert abs(fit.solve(0.5).item() - 15 / 7.5) < 1e-12  # X^T X = 5, X^T Y = 15, r = 2.5


def test_no_spread_gives_no_correction():
    fit = RidgeRegression(2, 3)
    fit.add(torch.zeros(4, 2), torch.randn(4, 3))
    assert torch.equal(fit.solve(), torch.zeros(2, 3, dtype=torch.float64))
