"""The shared shift by hand: means, their certainty, and what is added where."""

from __future__ import annotations

import pytest
import torch

import helpers
from kvexp.attention.rerotate import Rotary
from kvexp.methods.reuse import shift
from kvexp.methods.reuse.geometry import Geometry
from kvexp.methods.reuse.patched import RowSet
from kvexp.methods.reuse.shift import add, mean_of
from kvexp.prompt import Context


def geometry(*lengths: int, header: int = 1) -> Geometry:
    """One context of units of these lengths."""
    context = Context((9,) * header, tuple((5,) * length for length in lengths))
    return Geometry.of([context], [], torch.device("cpu"))


def all_rows(of: Geometry) -> RowSet:
    return RowSet.of(of, of.in_units())


def column(*numbers: float) -> torch.Tensor:
    """Rows of one head and one number, [1, 1, n, 1]."""
    return torch.tensor(numbers)[None, None, :, None]


def test_the_example_of_the_paper() -> None:
    """Reused 10, 20, 30, a shared shift of 2 and weights 1, 0.5, 0.1 give 12.0, 21.0 and 30.2."""
    rows = all_rows(geometry(3))
    values = torch.zeros(1, 1, 5, 1)
    values[0, 0, 1:4, 0] = torch.tensor([10.0, 20.0, 30.0])
    weights = torch.tensor([[0.0, 1.0, 0.5, 0.1, 0.0]])
    add(values, rows, torch.tensor([[[2.0]]]), weights)
    torch.testing.assert_close(values[0, 0, :, 0], torch.tensor([0.0, 12.0, 21.0, 30.2, 0.0]))


def test_means_are_over_the_probes_of_each_unit() -> None:
    rows = all_rows(geometry(3, 2))
    probes = torch.tensor([[True, False, True, True, True]])
    found = mean_of(rows, column(1.0, 100.0, 5.0, -2.0, 2.0), probes)
    assert found.mean.flatten().tolist() == [3.0, 0.0]
    assert found.counts.tolist() == [2.0, 2.0]
    # (1 - 3)^2 + (5 - 3)^2 over (2 - 1) * 2, and 8 over 2
    assert found.spread.flatten().tolist() == [4.0, 4.0]
    torch.testing.assert_close(found.shrunk().flatten(), torch.tensor([3.0 * (1 - 4 / 9), 0.0]))


def test_shrinking_by_hand() -> None:
    rows = all_rows(geometry(2, 1, 2, 2))
    residuals = torch.zeros(1, 2, 7, 2)
    residuals[0, 0, :2] = torch.tensor([[3.0, 0.0], [5.0, 2.0]])  # mean (4, 1), spread (2 + 2) / 2 = 2
    residuals[0, 1, :2] = torch.tensor([[1.0, 0.0], [-1.0, 1.0]])  # mean (0, .5), less than its spread
    residuals[0, :, 2] = 7.0  # a single probe tells nothing of its own error
    residuals[0, :, 3:5] = 4.0  # two that agree are taken whole
    shrunk = mean_of(rows, residuals, torch.ones(1, 7, dtype=torch.bool)).shrunk()
    torch.testing.assert_close(shrunk[0, 0], torch.tensor([4.0, 1.0]) * (1 - 2 / 17))
    assert shrunk[0, 1].tolist() == [0.0, 0.0]
    assert shrunk[1].abs().max() == 0
    assert (shrunk[2] == 4.0).all()
    assert shrunk[3].abs().max() == 0 and shrunk.isfinite().all()  # nothing moved


def test_a_unit_without_probes_is_not_shifted() -> None:
    rows = all_rows(geometry(2, 2))
    probes = torch.tensor([[True, True, False, False]])
    found = mean_of(rows, column(3.0, 3.0, 8.0, 8.0), probes)
    assert found.mean.flatten().tolist() == [3.0, 0.0] and found.counts.tolist() == [2.0, 0.0]
    x = torch.zeros(1, 1, 6, 1)
    add(x, rows, found.mean)
    assert x.flatten().tolist() == [0.0, 3.0, 3.0, 0.0, 0.0, 0.0]


def test_weights_of_heads_scale_each_head() -> None:
    rows = all_rows(geometry(2, header=0))
    x, weights = torch.zeros(1, 2, 3, 1), torch.tensor([[[0.5, 1.0, 1.0], [0.0, 0.25, 1.0]]])
    add(x, rows, torch.tensor([[[4.0], [8.0]]]), weights)
    assert x[0, :, :, 0].tolist() == [[2.0, 4.0, 0.0], [0.0, 2.0, 0.0]]


@pytest.mark.parametrize("family", ["llama", "cohere2", "gpt_oss", "phi3", "deepseek_v3"])
def test_a_shift_before_rotation_is_found_at_every_position(family: str) -> None:
    """Residuals that are one vector turned by each row's own position have that vector as their mean."""
    rotary, of = Rotary(helpers.model(family)), geometry(4, 3)
    rows = all_rows(of)
    angles = rotary.angles(0, of.positions)
    assert angles is not None
    config = helpers.model(family).config
    dim = config.qk_rope_head_dim if family == "deepseek_v3" else config.head_dim
    vectors = torch.randn(2, 1, dim, generator=torch.Generator().manual_seed(0))
    x = torch.zeros(1, 1, of.ids.shape[1], dim)
    add(x, rows, vectors, None, angles)
    units = of.units_of[0]
    for at in range(x.shape[2]):
        if units[at] < 0:
            assert x[0, 0, at].abs().max() == 0
    found = mean_of(
        rows, rows.take(x), torch.ones(1, 7, dtype=torch.bool), angles.at(rows.sequences, rows.columns)
    )
    torch.testing.assert_close(found.mean, vectors, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.shrunk(), vectors, atol=1e-5, rtol=1e-4)
    plain = mean_of(rows, rows.take(x), torch.ones(1, 7, dtype=torch.bool))
    assert not torch.allclose(plain.mean, vectors, atol=1e-3)


def test_low_precision_rows_are_shifted_in_float32() -> None:
    rows = all_rows(geometry(1, header=0))
    x = torch.full((1, 1, 2, 1), 256.0, dtype=torch.bfloat16)
    for _ in range(2):
        add(x, rows, torch.tensor([[[1.5]]]))
    assert x[0, 0, 0, 0] == 260.0  # 256 + 1.5 rounds to 258, and that to 260; in bfloat16, 256 + 1.5 too
    assert x.dtype == torch.bfloat16


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("axes", [0, 2, 3])
def test_the_kernel_adds_the_same(turned: bool, axes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    of, generator = geometry(3, 2), torch.Generator().manual_seed(0)
    rows, width = all_rows(of), of.width
    x, mean = (torch.randn(*shape, generator=generator) for shape in ((1, 2, width, 16), (2, 2, 16)))
    weights = torch.rand(1, *[2] * (axes - 2), width, generator=generator) if axes else None
    angles = Rotary(helpers.model("llama")).angles(0, torch.arange(width)[None]) if turned else None
    plain, fused = x.clone(), x.clone()
    add(plain, rows, mean, weights, angles)
    monkeypatch.setattr(shift, "fused", lambda *tensors: True)  # as where there is a kernel
    add(fused, rows, mean, weights, angles)
    torch.testing.assert_close(fused, plain)
    assert not torch.equal(plain, x)
