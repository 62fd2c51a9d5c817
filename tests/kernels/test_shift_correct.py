"""Rows move and get their unit's weighted, turned shift."""

from __future__ import annotations

import pytest
import torch

from kvexp_kernels.shift_correct import Shift, Turn, shift_correct

LAYOUTS = [(5, False, False), (5, True, True), (3, True, False), (2, False, True)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 5e-3, torch.bfloat16: 0.04}


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def turn(rows: tuple[int, ...], bands: int, adjacent: bool, last: bool, seed: int) -> Turn:
    angle = numbers(*rows, bands, seed=seed) * 3
    return Turn(angle.cos(), angle.sin(), adjacent, last)


def shift(weights: tuple[int, ...] | None = (2, 3, 9), by: Turn | None = None) -> Shift:
    units = torch.randint(-1, 3, (2, 9), generator=torch.Generator().manual_seed(7))
    held = None if weights is None else numbers(*weights, seed=8)
    return Shift(numbers(3, 3, 10, seed=6), units, held, by)


def slow(x: torch.Tensor, added: Shift, move: Turn | None) -> torch.Tensor:
    """Row by row, in float64."""
    out = x.double().clone()
    for b, h, c in torch.cartesian_prod(*(torch.arange(n) for n in x.shape[:3])).tolist():

        def turned(row: torch.Tensor, by: Turn | None, b: int = b, c: int = c) -> torch.Tensor:
            if by is None:
                return row
            cos, sin = ((t if t.dim() == 2 else t[b, 0])[c].double() for t in (by.cos, by.sin))
            return Turn(cos, sin, by.adjacent, by.last).of(row)

        out[b, h, c] = turned(out[b, h, c].clone(), move)
        unit = int(added.units[b, c])
        if unit >= 0:
            weight = 1.0
            if added.weights is not None:
                weight = float(added.weights[b, c] if added.weights.dim() == 2 else added.weights[b, h, c])
            out[b, h, c] += weight * turned(added.mean[unit, h].double(), added.turn)
    return out


def to(added: Shift, move: Turn | None, device: str) -> tuple[Shift, Turn | None]:
    def there(by: Turn | None) -> Turn | None:
        return None if by is None else Turn(by.cos.to(device), by.sin.to(device), by.adjacent, by.last)

    weights = None if added.weights is None else added.weights.to(device)
    return Shift(added.mean.to(device), added.units.to(device), weights, there(added.turn)), there(move)


def cases() -> list[tuple[Shift, Turn | None]]:
    found: list[tuple[Shift, Turn | None]] = [(shift(None), None), (shift((2, 9)), None), (shift(), None)]
    for layout in LAYOUTS:
        by, move = turn((9,), *layout, seed=3), turn((2, 1, 9), *layout, seed=4)
        found += [(shift(by=by), move), (shift(by=by), None), (shift(None), move)]
    return found


def test_by_hand():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])[None, None]
    added = Shift(torch.tensor([[[10.0, 20.0]]]), torch.tensor([[0, -1, 0]]), torch.tensor([[1.0, 9.0, 0.5]]))
    assert shift_correct(x, added)[0, 0].tolist() == [[11.0, 22.0], [3.0, 4.0], [10.0, 16.0]]
    assert shift_correct(x, added, out=x) is x and x[0, 0, 2].tolist() == [10.0, 16.0]


@pytest.mark.parametrize("case", range(len(cases())))
def test_every_combination(case):
    added, move = cases()[case]
    x = numbers(2, 3, 9, 10, seed=1)
    want = slow(x, added, move)
    torch.testing.assert_close(shift_correct(x, added, move).double(), want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("case", range(len(cases())))
def test_kernel(device, poisoned, case, dtype):
    from kvexp_kernels.shift_correct import triton

    added, move = cases()[case]
    x = numbers(2, 9, 3, 10, seed=1, dtype=dtype).transpose(1, 2)
    want = slow(x, added, move)
    there = x.to(device)
    ours = triton.shift_correct(there, *to(added, move, device))
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double().cpu(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert triton.shift_correct(there, *to(added, move, device), out=there) is there
    assert torch.equal(there, ours)


def test_bands_must_agree(device):
    from kvexp_kernels.shift_correct import triton

    added = shift(by=turn((9,), 5, False, False, seed=3))
    with pytest.raises(ValueError, match="bands differ"):
        triton.shift_correct(numbers(2, 3, 9, 10, seed=1), added, turn((9,), 5, True, False, seed=4))
