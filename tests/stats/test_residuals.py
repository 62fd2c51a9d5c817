"""Residuals made by hand, of which it is known what a mean explains and what spectra they have."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvexp.stats.residuals import RemovedSums, ResidualSums, mean_energy, singular_energies


def sums(*residuals: torch.Tensor, states: float = 1.0) -> ResidualSums:
    """Units [H, n, D] whose fresh rows are all `states`."""
    found = ResidualSums()
    for one in residuals:
        found.add(one, torch.full_like(one, states))
    return found


def rows(*numbers: list[float]) -> torch.Tensor:
    """Residuals of one head, [1, n, D]."""
    return torch.tensor(numbers)[None]


def test_a_constant_residual_is_its_mean() -> None:
    found = sums(rows([3.0, 0.0, 4.0]).expand(1, 5, 3), states=2.0).figures()
    assert found["explained"] == found["unit_share"] == found["top"] == 1
    assert found["spectrum"].tolist() == pytest.approx([1, 0, 0])
    assert found["centred"].tolist() == pytest.approx([0, 0, 0])
    assert found["top_centred"].isnan()  # nothing is left
    assert found["norm"] == 5 and found["relative"] == pytest.approx(25 / 12)
    assert found["chance"] == found["first"] == pytest.approx(1 / 5)
    assert found["first_two"] == pytest.approx(2 / 5)


@pytest.mark.parametrize("n", [2, 3, 6])
def test_orthogonal_residuals_share_nothing(n: int) -> None:
    """n axes: the mean holds 1/n, the n directions too, and n - 1 of them are left without the mean."""
    found = sums(7 * torch.eye(n, 6)[None]).figures()
    assert found["explained"] == pytest.approx(1 / n) and found["chance"] == pytest.approx(1 / n)
    assert found["spectrum"].tolist() == pytest.approx([1 / n] * n + [0] * (6 - n))
    assert found["centred"].tolist() == pytest.approx([1 / n] * (n - 1) + [0] * (7 - n), abs=1e-12)
    assert found["top_centred"] == pytest.approx(1 / (n - 1))


def test_opposite_residuals_have_no_mean() -> None:
    found = sums(rows([1.0, 2.0], [-1.0, -2.0])).figures()
    assert found["explained"] == 0 and found["chance"] == 0.5
    assert found["top"] == found["top_centred"] == 1
    assert found["centred"].tolist() == found["spectrum"].tolist()


def test_energies_weigh_units_and_shares_do_not() -> None:
    """Of energy 100 a mean holds all, of energy 2 none: 100/102, or a half."""
    big, small = rows([5.0, 0.0]).expand(1, 4, 2), rows([1.0, 0.0], [-1.0, 0.0])
    found = sums(big, small).figures()
    assert found["explained"] == pytest.approx(100 / 102) and found["unit_share"] == 0.5
    assert found["chance"] == pytest.approx((100 / 4 + 2 / 2) / 102)
    assert found["first"] == pytest.approx((25 + 1) / 102)
    assert found["first_two"] == pytest.approx((50 + 2) / 102)
    assert found["norm"] == pytest.approx((4 * 5 + 2 * 1) / 6)
    assert found["relative"] == pytest.approx(102 / 12)


def test_a_unit_that_is_off_by_rounding_is_in_no_mean_over_units() -> None:
    stale, still = rows([1.0, 1.0], [3.0, 1.0]), rows([1e-6, 0.0], [-1e-6, 0.0])
    one, both = sums(stale).figures(), sums(stale, still).figures()
    for name in ("unit_share", "top", "top_centred", "spectrum", "centred"):
        torch.testing.assert_close(both[name], one[name])
    assert both["relative"] == pytest.approx(12 / 8) and one["relative"] == pytest.approx(12 / 4)
    nothing = sums(still, torch.zeros(1, 3, 2)).figures()
    assert nothing["unit_share"].isnan() and nothing["spectrum"].isnan().all()
    assert sums(torch.zeros(1, 3, 2)).figures()["relative"] == 0


def test_heads_stand_apart_and_add_up() -> None:
    x = torch.stack([torch.ones(4, 2), 2 * torch.tensor([[1.0, 0.0], [-1.0, 0.0]] * 2)])
    found = sums(x)
    assert found.figures(by_head=True)["explained"].tolist() == [1, 0]
    assert found.figures(by_head=True)["spectrum"].tolist() == [[1, 0], [1, 0]]
    assert found.figures()["explained"] == pytest.approx(8 / (8 + 16))
    assert found.figures()["unit_share"] == 0.5


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 9), dim=st.integers(1, 9), seed=st.integers(0, 10**6), shift=st.floats(0, 5))
def test_spectra_are_those_of_a_decomposition(n: int, dim: int, seed: int, shift: float) -> None:
    x = torch.randn(2, n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + shift
    energies = singular_energies(x)
    torch.testing.assert_close(energies, torch.linalg.svdvals(x).square(), atol=1e-9, rtol=1e-7)
    found = sums(x).figures(by_head=True)
    total = x.square().sum((1, 2))
    torch.testing.assert_close(found["spectrum"][:, : min(n, dim)], energies / total[:, None])
    torch.testing.assert_close(found["spectrum"].sum(-1), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(found["centred"].sum(-1), 1 - found["explained"], atol=1e-9, rtol=1e-7)
    assert (found["explained"] <= found["top"] + 1e-9).all()  # no direction holds more than the first


def test_chance_is_the_mean_over_all_signs() -> None:
    """Residuals that point one way or the other with equal odds: what is explained, on average."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    signs = torch.tensor(list(itertools.product((1.0, -1.0), repeat=4)), dtype=torch.float64)
    expected = float(mean_energy(signs[..., None] * x).mean() / x.square().sum())
    assert float(sums(x[None]).figures()["chance"]) == pytest.approx(expected) == pytest.approx(1 / 4)


def test_what_a_correction_removes() -> None:
    found = RemovedSums()
    assert found.removed().isnan()
    before = torch.tensor([[[2.0], [0.0]], [[3.0], [0.0]]])
    found.add(before, before / 2)
    assert found.removed() == 0.75
    found.add(before, torch.tensor([[[1.0], [0.0]], [[0.0], [9.0]]]))
    assert found.removed(by_head=True).tolist() == pytest.approx([1 - 2 / 8, 1 - (9 / 4 + 81) / 18])
    assert found.removed() == pytest.approx(1 - (2 + 9 / 4 + 81) / 26)  # worse than nothing: below 0


def test_half_precision_is_summed_in_double() -> None:
    found = sums(torch.full((1, 4096, 1), 0.1, dtype=torch.bfloat16)).figures()
    assert found["norm"] == pytest.approx(float(torch.tensor(0.1, dtype=torch.bfloat16)), rel=1e-9)
    assert found["explained"] == pytest.approx(1, rel=1e-9)
