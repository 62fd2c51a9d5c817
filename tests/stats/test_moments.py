"""Moments of bands: brute force, by hand, and parts that add up."""

from __future__ import annotations

import pytest
import torch

from kvexp.stats import moments as stats_moments
from kvexp.stats.moments import NAMES, Moments, MomentSums


def vectors(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    turning = torch.randn(2, n, 3, generator=numbers, dtype=torch.complex64)
    return turning, torch.randn(2, n, 4, generator=numbers)


def test_by_hand() -> None:
    """1 and i: mean (1 + i) / 2 of length 0.707, size 1, spread 1 - 1/2. 3, -1: mean 1, size 2, spread 4."""
    sums = MomentSums()
    sums.add(torch.tensor([[[1 + 0j], [1j]]]), torch.tensor([[[3.0], [-1.0]]]))
    found = sums.moments()
    assert found.mean.item() == 0.5 + 0.5j
    assert (found.magnitude.item(), found.square.item()) == (1, 1)
    assert found.concentration.item() == pytest.approx(0.5**0.5)
    assert found.variance.item() == pytest.approx(0.5)
    assert (found.still_mean.item(), found.still_magnitude.item(), found.still_square.item()) == (1, 2, 5)
    assert found.still_variance.item() == 4


def test_equal_means_over_all_vectors_in_any_cut() -> None:
    turning, still = vectors(50, 1)
    whole, first, second = MomentSums(), MomentSums(), MomentSums()
    whole.add(turning, still)
    first.add(turning[:, :13], still[:, :13])
    second.add(turning[:, 13:20], still[:, 13:20])
    second.add(turning[:, 20:], still[:, 20:])
    first.merge(second)
    first.merge(MomentSums())
    assert first.count == 50
    z, x = turning.to(torch.complex128), still.double()
    expected = (
        z.mean(1),
        z.abs().mean(1),
        z.abs().square().mean(1),
        x.mean(1),
        x.abs().mean(1),
        (x * x).mean(1),
    )
    for name, value in zip(NAMES, expected, strict=True):
        assert getattr(whole.moments(), name).dtype in (torch.float64, torch.complex128)
        torch.testing.assert_close(getattr(whole.moments(), name), value, atol=1e-12, rtol=0)
        torch.testing.assert_close(getattr(first.moments(), name), value, atol=1e-12, rtol=0)


def test_many_vectors_come_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, blocks = MomentSums(), MomentSums()
    whole.add(*vectors(50, 1))
    monkeypatch.setattr(stats_moments, "BLOCK", 7)
    blocks.add(*vectors(50, 1))
    assert blocks.count == 50
    torch.testing.assert_close(blocks.moments().mean, whole.moments().mean, atol=1e-12, rtol=0)
    torch.testing.assert_close(
        blocks.moments().still_square, whole.moments().still_square, atol=1e-12, rtol=0
    )


def test_tensors_give_the_same_moments_back() -> None:
    sums = MomentSums()
    sums.add(*vectors(5, 2))
    found = sums.moments()
    again = Moments.of(found.tensors())
    assert all(torch.equal(getattr(again, name), getattr(found, name)) for name in NAMES)
    assert found.nbytes() == 8 * 2 * (2 * 3 + 3 + 3 + 3 * 4)
    assert torch.equal(found.to("cpu").mean, found.mean)


def test_nothing_counted_has_no_means() -> None:
    with pytest.raises(ValueError, match="no vectors"):
        MomentSums().moments()


def test_a_band_of_zeros_is_not_concentrated() -> None:
    sums = MomentSums()
    sums.add(torch.zeros(1, 3, 1, dtype=torch.complex64), torch.zeros(1, 3, 0))
    assert sums.moments().concentration.item() == 0
