"""The kernel over packed rows equals attention to what they come back as."""

from __future__ import annotations

import pytest
import torch

from kvexp_kernels.dequant_attend import reference
from kvexp_kernels.quantise import Packed, quantise

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 0.032}


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(
    batch: int, rows: int, width: int, bits: int, group: int, dim: int, extra: int = 0, seed: int = 1
) -> Packed:
    return quantise(numbers(batch, 2, rows + extra, width, seed=seed) * 3 + 1, bits, group, dim)


def compare(device, query, keys, values, visible=None, parts=None) -> None:
    from kvexp_kernels.dequant_attend import triton

    want = reference.dequant_attend(query, keys, values, 0.3, visible)
    keys, values = (x.each(lambda t: t.to(device)) for x in (keys, values))
    seen = None if visible is None else visible.to(device)
    a, s = triton.dequant_attend(query.to(device), keys, values, 0.3, seen, parts=parts)
    assert (a.dtype, s.dtype) == (query.dtype, torch.float32)
    tolerance = TOLERANCE[query.dtype]
    torch.testing.assert_close((a.cpu(), s.cpu()), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_kivi(device, poisoned, bits, dtype):
    query = numbers(2, 6, 1, 20, seed=3, dtype=dtype)
    keys, values = packed(2, 43, 20, bits, 8, -2, extra=8), packed(2, 43, 12, bits, 5, -1)
    compare(device, query, keys, values, parts=2)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(-1, -2), (-1, -1), (-2, -2)])
def test_other_groups(device, poisoned, key_dim, value_dim):
    keys, values = packed(1, 40, 18, 4, 7, key_dim), packed(1, 40, 16, 2, 3, value_dim)
    compare(device, numbers(1, 4, 2, 18, seed=3), keys, values, parts=1)


def test_rows_that_serve_the_whole_batch_and_a_mask(device, poisoned):
    keys, values = packed(1, 37, 16, 4, 8, -2), packed(1, 37, 16, 2, 8, -1)
    visible = numbers(1, 2, 37, seed=4) > 0
    visible[0, 1] = False  # a head that sees nothing
    compare(device, numbers(3, 4, 2, 16, seed=3), keys, values, visible, parts=2)


def test_views_of_rows_and_heads(device, poisoned):
    keys, values = packed(1, 48, 16, 4, 8, -2), packed(1, 48, 16, 4, 8, -1)
    keys, values = keys.part(8, 40), values.part(8, 40)
    compare(device, numbers(1, 2, 1, 16, seed=3), keys, values)


def test_no_rows(device, poisoned):
    keys, values = (packed(1, 8, 16, 4, 8, dim).part(0, 0) for dim in (-2, -1))
    compare(device, numbers(1, 2, 1, 16, seed=3), keys, values)
