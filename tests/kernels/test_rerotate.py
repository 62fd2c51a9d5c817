"""Rotation of bands, against multiplication by complex numbers."""

from __future__ import annotations

import pytest
import torch

from kvexp_kernels.rerotate import Turn, rerotate

LAYOUTS = [(5, False, False), (5, True, True), (3, True, False), (2, False, True)]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 0.016}


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def turn(rows: tuple[int, ...], bands: int, adjacent: bool, last: bool) -> Turn:
    angle = numbers(*rows, bands, seed=9) * 3
    return Turn(angle.cos(), angle.sin(), adjacent, last)


def slow(x: torch.Tensor, by: Turn) -> torch.Tensor:
    out, (left, right) = x.double().clone(), by.pairs(x.double())
    turned = torch.complex(left, right) * torch.complex(by.cos.double(), by.sin.double())
    for place, part in zip(by.pairs(out), (turned.real, turned.imag), strict=True):
        place.copy_(part)
    return out


def test_pairs_by_hand():
    x = torch.arange(6)
    for adjacent, last, left, right in [
        (False, False, [0, 1], [2, 3]),
        (True, False, [0, 2], [1, 3]),
        (False, True, [2, 3], [4, 5]),
        (True, True, [2, 4], [3, 5]),
    ]:
        pairs = Turn(torch.ones(2), torch.zeros(2), adjacent, last).pairs(x)
        assert [part.tolist() for part in pairs] == [left, right]


def test_a_quarter_turn_by_hand():
    x = torch.tensor([1.0, 2.0, 3.0])[None, None, None]
    quarter = Turn(torch.zeros(1, 1), torch.ones(1, 1))
    assert rerotate(x, quarter).flatten().tolist() == [-2.0, 1.0, 3.0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [(7,), (2, 1, 7)])
def test_every_layout_and_in_place(layout, rows):
    x, by = numbers(2, 3, 7, 10, seed=1), turn(rows, *layout)
    want = slow(x, by)
    torch.testing.assert_close(rerotate(x, by).double(), want, atol=1e-6, rtol=1e-6)
    assert rerotate(x, by, out=x) is x
    torch.testing.assert_close(x.double(), want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [(7,), (2, 1, 7)])
def test_kernel(device, poisoned, layout, rows, dtype):
    from kvexp_kernels.rerotate import triton

    x, by = numbers(2, 7, 3, 10, seed=1, dtype=dtype).transpose(1, 2), turn(rows, *layout)
    want = slow(x, by)
    moved = Turn(by.cos.to(device), by.sin.to(device), by.adjacent, by.last)
    there = x.to(device)
    ours = triton.rerotate(there, moved)
    assert ours.dtype == dtype and torch.equal(there.cpu(), x)
    torch.testing.assert_close(ours.double().cpu(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert triton.rerotate(there, moved, out=there) is there and torch.equal(there, ours)


def test_kernel_on_many_rows_and_on_none(device, poisoned):
    from kvexp_kernels.rerotate import triton

    x, by = numbers(1, 1, 300, 64, seed=1), turn((300,), 32, False, False)
    moved = Turn(by.cos.to(device), by.sin.to(device))
    ours = triton.rerotate(x.to(device), moved)
    torch.testing.assert_close(ours.double().cpu(), slow(x, by), atol=1e-6, rtol=1e-6)
    none = Turn(moved.cos[:0], moved.sin[:0])
    assert triton.rerotate(x[:, :, :0].to(device), none).shape == (1, 1, 0, 64)
