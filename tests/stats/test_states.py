"""Aggregated states equal the formulas of the paper, however the samples arrive."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvexp.stats.states import StateAccumulator, States

K, H, DV = 4, 3, 5


def samples(seed: int, n: int, spread: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Index, s, a and an extra field of n samples; the last centroid gets none."""
    g = torch.Generator().manual_seed(seed)
    index = torch.randint(0, K - 1, (n,), generator=g)
    s = torch.randn(n, H, generator=g, dtype=torch.float64) * spread
    a = torch.randn(n, H, DV, generator=g, dtype=torch.float64)
    return index, s, a, torch.randn(n, 2, generator=g, dtype=torch.float64)


def accumulate(data: tuple[Tensor, ...], rule: str, sizes: list[int]) -> StateAccumulator:
    """Feed samples in blocks of the given sizes, the rest in one block."""
    acc = StateAccumulator(K, H, DV, torch.float64, rule, extras={"key": (2,)})
    rest = len(data[0]) - sum(sizes)
    for index, s, a, key in zip(*(t.split([*sizes, rest]) for t in data), strict=True):
        acc.add(index, s, a, key=key)
    return acc


def direct(data: tuple[Tensor, ...], rule: str, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, log Z, std of s and mean of the extra field of centroid k, from all its samples at once."""
    index, s, a, key = (t[data[0] == k] for t in data)
    std = s.std(0, correction=0)
    if rule == "mean":
        return a.mean(0), s.mean(0), std, key.mean(0)
    weight = torch.softmax(s, 0).unsqueeze(-1)
    return (weight * a).sum(0), torch.logsumexp(s, 0) - math.log(len(index)), std, key.mean(0)


def assert_equal(one: States, two: States) -> None:
    for name in States._fields:
        torch.testing.assert_close(getattr(one, name), getattr(two, name), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rule", ["eq5", "mean"])
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.1, 3.0, 300.0]),
    sizes=st.lists(st.integers(0, 12), max_size=4),
)
def test_equals_the_direct_formula_for_any_blocks_order_and_shards(rule, seed, spread, sizes):
    n = sum(sizes) + 10
    data = samples(seed, n, spread)
    acc = accumulate(data, rule, sizes)
    states = acc.finish()
    assert torch.equal(states.counts, torch.bincount(data[0], minlength=K))
    for k in range(K):
        if states.counts[k]:
            a, log_z, std, key = direct(data, rule, k)
            torch.testing.assert_close(states.a[k], a, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(states.log_z[k], log_z, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(states.std_s[k], std, rtol=1e-8, atol=1e-8)
            torch.testing.assert_close(acc.mean("key")[k], key, rtol=1e-10, atol=1e-10)
    shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    assert_equal(accumulate(tuple(t[shuffled] for t in data), rule, [n // 2]).finish(), states)

    def shard(low: int, high: int) -> StateAccumulator:
        return accumulate(tuple(t[low:high] for t in data), rule, [])

    left, right, tail = shard(0, 4), shard(0, 4), shard(4, 7)
    left.merge(shard(4, 7))
    left.merge(shard(7, n))
    tail.merge(shard(7, n))
    right.merge(tail)
    for merged in (left, right):
        assert_equal(merged.finish(), states)
        torch.testing.assert_close(merged.mean("key"), acc.mean("key"), rtol=1e-10, atol=1e-10)


def test_both_rules_by_hand():
    index = torch.tensor([0, 0])
    s, a = torch.tensor([[0.0], [math.log(3.0)]]), torch.tensor([[[0.0, 4.0]], [[8.0, 0.0]]])
    found = {}
    for rule in ("eq5", "mean"):
        acc = StateAccumulator(1, 1, 2, rule=rule)
        acc.add(index, s, a)
        found[rule] = acc.finish()
    # Masses 1 and 3: Z_bar = 2, weights 1/4 and 3/4. Plain means: log sqrt(3), weights 1/2 each.
    torch.testing.assert_close(found["eq5"].a, torch.tensor([[[6.0, 1.0]]]))
    torch.testing.assert_close(found["eq5"].log_z, torch.tensor([[math.log(2.0)]]))
    torch.testing.assert_close(found["mean"].a, torch.tensor([[[4.0, 2.0]]]))
    torch.testing.assert_close(found["mean"].log_z, torch.tensor([[math.log(3.0) / 2]]))
    for states in found.values():
        torch.testing.assert_close(states.std_s, torch.tensor([[math.log(3.0) / 2]]))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.0, 1.0, 100.0]))
def test_mass_weighting_never_gives_less_than_the_plain_mean(seed, spread):
    data = samples(seed, 30, spread)
    by_mass, plain = accumulate(data, "eq5", [7]).finish(), accumulate(data, "mean", [7]).finish()
    seen = by_mass.counts > 0
    assert (by_mass.log_z[seen] >= plain.log_z[seen] - 1e-12).all()


@pytest.mark.parametrize("rule", ["eq5", "mean"])
def test_extreme_and_empty_samples_stay_finite(rule):
    acc = StateAccumulator(3, 1, 1, rule=rule)
    empty = torch.tensor([[-math.inf]])
    nothing = torch.tensor([[[math.nan]]])
    acc.add(torch.tensor([1]), empty, nothing)
    acc.add(torch.tensor([0]), torch.tensor([[-1e4]]), torch.tensor([[[5.0]]]))
    acc.add(torch.tensor([0]), torch.tensor([[1e4]]), torch.tensor([[[7.0]]]))
    acc.add(torch.tensor([2, 2]), torch.tensor([[1.5], [-math.inf]]), torch.tensor([[[3.0]], [[math.nan]]]))
    other = StateAccumulator(3, 1, 1, rule=rule)
    other.add(torch.tensor([1]), empty, nothing)
    acc.merge(other)
    states = acc.finish()
    assert states.counts.tolist() == [2, 2, 2]
    assert torch.isfinite(states.a).all() and torch.isfinite(states.std_s).all()
    assert states.log_z[1] == -math.inf and states.a[1] == 0
    top = (7.0, 1e4 - math.log(2)) if rule == "eq5" else (6.0, 0.0)
    torch.testing.assert_close((states.a[0].item(), states.log_z[0].item()), top)
    # A sample without mass halves the mean of Z, and is left out of the mean of log Z.
    want = 1.5 - math.log(2) if rule == "eq5" else 1.5
    torch.testing.assert_close((states.a[2].item(), states.log_z[2].item()), (3.0, want))


def test_refusals():
    acc = StateAccumulator(1, 1, 1)
    with pytest.raises(ValueError, match="rule"):
        StateAccumulator(1, 1, 1, rule="eq6")
    with pytest.raises(ValueError, match="NaN"):
        acc.add(torch.tensor([0]), torch.tensor([[math.nan]]), torch.zeros(1, 1, 1))
    with pytest.raises(ValueError, match="extra fields"):
        acc.add(torch.tensor([0]), torch.zeros(1, 1), torch.zeros(1, 1, 1), key=torch.zeros(1))
    with pytest.raises(ValueError, match="merged"):
        acc.merge(StateAccumulator(1, 1, 1, rule="mean"))
