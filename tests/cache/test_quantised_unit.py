"""Units of a store: everything is packed, outliers come back exactly, tensors are enough to restore one."""

from __future__ import annotations

import pytest
import torch

from kvexp.cache.packing import quantise
from kvexp.cache.quantised_unit import QuantisedUnit, quantised
from kvexp.cache.scheme import Scheme
from storage_reference import smoothed

KIVI, OTT = Scheme(2, 4, 8), Scheme(2, 4, 8, True, 1, 8)


def unit(rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [2, 3, rows, 8] and values [2, 3, rows, 6]."""
    numbers = torch.Generator().manual_seed(rows)
    return tuple(torch.randn(2, 3, rows, width, generator=numbers).to(dtype) for width in (8, 6))  # type: ignore


@pytest.mark.parametrize("rows", [1, 4, 11])
def test_all_rows_are_packed(rows: int) -> None:
    keys, values = unit(rows)
    packed = quantised(keys, values, KIVI)
    assert packed.outliers is None
    ours = packed.restored(torch.float32)
    assert torch.equal(ours[0], quantise(keys, 2, 4, -2).dequantise())
    assert torch.equal(ours[1], quantise(values, 2, 4, -1).dequantise())
    groups = -(-rows // 4)
    heads = 2 * 3
    assert packed.nbytes == heads * (rows * 2 + groups * 8 * 4 + rows * 2 + rows * 2 * 4)


@pytest.mark.parametrize("rows", [1, 2, 8, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outliers_come_back_exactly(rows: int, dtype: torch.dtype) -> None:
    keys, values = unit(rows, dtype)
    packed = quantised(keys, values, OTT)
    ours = packed.restored(dtype)
    whole = rows // 4 * 4
    for b in range(2):
        for h in range(3):
            smooth, kept = smoothed(keys[b, h], values[b, h], whole, OTT)
            assert len(kept) >= min(1, whole // 4)
            for x, back, theirs, dim in zip((keys, values), ours, smooth, (-2, -1), strict=True):
                for row in kept:
                    assert torch.equal(back[b, h, row], x[b, h, row])
                others = [row for row in range(whole) if row not in kept]
                again = quantise(theirs[:whole], 2, 4, dim).dequantise(dtype)
                torch.testing.assert_close(back[b, h, others], again[others], atol=1e-5, rtol=1e-2)


def test_a_short_last_block_is_searched_too() -> None:
    keys, values = unit(7)
    keys[:, :, 5] = 1e-3
    packed = quantised(keys, values, OTT)
    assert packed.outliers is not None
    assert ((packed.outliers.rows == 5).any(-1)).all()
    assert torch.equal(packed.restored(torch.float32)[0][:, :, 5], keys[:, :, 5])


def test_without_outliers_ott_is_kivi() -> None:
    keys, values = unit(11)
    ours = quantised(keys, values, Scheme(2, 4, 3, True, 0, 8)).restored(torch.float32)
    theirs = quantised(keys, values, KIVI).restored(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_eight_bits_are_near_lossless_and_more_bits_are_better() -> None:
    keys, values = unit(64)
    errors = []
    for bits in (2, 4, 8):
        back = quantised(keys, values, Scheme(bits, 32, 32)).restored(torch.float32)
        errors.append([((a - b).norm() / b.norm()).item() for a, b in zip(back, (keys, values), strict=True)])
    assert errors[0] > errors[1] > errors[2]
    assert max(errors[2]) < 6e-3


@pytest.mark.parametrize("scheme", [KIVI, OTT])
def test_tensors_are_enough_to_restore_a_unit(scheme: Scheme) -> None:
    keys, values = unit(11)
    packed = quantised(keys, values, scheme)
    tensors = packed.tensors()
    assert sum(t.numel() * t.element_size() for t in tensors.values()) == packed.nbytes
    again = QuantisedUnit.of_tensors(dict(tensors), scheme, (8, 6))
    for a, b in zip(again.restored(torch.float32), packed.restored(torch.float32), strict=True):
        assert torch.equal(a, b)
    assert again.nbytes == packed.nbytes
