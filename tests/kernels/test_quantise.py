"""Quantisation in groups: hand-computed codes and bytes, bounds of the error, rows cut out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvexp_kernels.quantise import BITS, pack_bits, quantise, unpack_bits


@pytest.mark.parametrize(
    ("bits", "codes", "packed"),
    [
        (2, [1, 2, 3, 0, 2], [0b00_11_10_01, 0b00_00_00_10]),  # the first code in the lowest bits
        (4, [5, 15, 9], [0xF5, 0x09]),
        (8, [7, 255], [7, 255]),
    ],
)
def test_codes_lie_side_by_side(bits: int, codes: list[int], packed: list[int]) -> None:
    given_codes = torch.tensor([codes], dtype=torch.uint8)
    found = pack_bits(given_codes, bits)
    assert found.dtype == torch.uint8 and found.tolist() == [packed]
    assert torch.equal(unpack_bits(found, bits, len(codes)), given_codes)


@given(bits=st.sampled_from(BITS), n=st.integers(1, 40), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_codes_survive_packing(bits: int, n: int, seed: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (2, 3, n), generator=numbers, dtype=torch.uint8)
    packed = pack_bits(codes, bits)
    assert packed.shape[-1] == math.ceil(n * bits / 8)
    assert torch.equal(unpack_bits(packed, bits, n), codes)


def test_a_channel_by_hand() -> None:
    # Two channels of four rows. The first: m = -1, s = 6 / 3 = 2, codes 0, 1, 2 (3 is half way: to even), 3.
    x = torch.tensor([[-1.0, 5.0], [1.5, 5.0], [4.0, 5.0], [5.0, 5.0]])
    packed = quantise(x, bits=2, group=4, dim=-2)
    assert (packed.minimum.tolist(), packed.scale.tolist()) == ([[-1.0, 5.0]], [[2.0, 0.0]])
    assert packed.codes.tolist() == [[0], [1], [2], [3]]
    assert packed.dequantise().tolist() == [[-1, 5], [1, 5], [3, 5], [5, 5]]
    assert packed.nbytes == 4 + 2 * 2 + 2 * 2


def test_a_row_by_hand() -> None:
    # Groups of two channels, the last one alone: (0, 3), (-2, 13), (7,); four bits, so s = 3/15, 15/15, 0.
    x = torch.tensor([[0.0, 3.0, -2.0, 13.0, 7.0]])
    packed = quantise(x, bits=4, group=2, dim=-1)
    assert packed.minimum.tolist() == [[0.0, -2.0, 7.0]]
    assert packed.scale.tolist() == [[pytest.approx(0.2, abs=1e-4), 1.0, 0.0]]
    assert packed.codes.tolist() == [[0xF0, 0xF0, 0x00]]
    torch.testing.assert_close(packed.dequantise(), x, atol=1e-3, rtol=0)


@given(
    bits=st.sampled_from(BITS),
    dim=st.sampled_from([-2, -1]),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    group=st.integers(1, 10),
    spread=st.sampled_from([1e-3, 1.0, 50.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=120, deadline=None)
def test_no_number_is_off_by_more_than_half_a_step(
    bits: int, dim: int, shape: tuple[int, int], group: int, spread: float, seed: int
) -> None:
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed)) * spread
    back = quantise(x, bits, group, dim).dequantise()
    assert back.shape == x.shape
    for part, found in zip(x.split(group, dim), back.split(group, dim), strict=True):
        low, high = part.amin(dim, keepdim=True), part.amax(dim, keepdim=True)
        # Half a step; scale and minimum are rounded to 11 bits, and numbers at the ends are clamped to them.
        rounding = ((high - low) + low.abs()) * 2**-11 + 2**-24 * 2**bits
        bound = (high - low) / (2**bits - 1) / 2 + rounding
        assert bool(((found - part).abs() <= bound * 1.001).all())


@pytest.mark.parametrize("value", [0.0, 1.0, -3.25, 1 / 3])
def test_equal_numbers_come_back(value: float) -> None:
    x = torch.full((3, 8), value)
    for dim in (-2, -1):
        back = quantise(x, 2, 4, dim).dequantise()
        assert back.unique().numel() == 1 and back[0, 0].item() == pytest.approx(value, rel=2**-11)


def test_numbers_beyond_float16_stay_finite() -> None:
    x = torch.tensor([[-1e6, 0.0, 3.0, 1e6]])
    assert quantise(x, 4, 4, -1).dequantise().isfinite().all()


@pytest.mark.parametrize("dim", [-2, -1])
def test_rows_can_be_cut_out(dim: int) -> None:
    x = torch.randn(2, 3, 11, 6, generator=torch.Generator().manual_seed(0))
    packed = quantise(x, 4, 4, dim)
    whole = packed.dequantise()
    for start, stop in ((0, 11), (3, 9), (5, 6), (8, 11), (4, 4)):
        assert torch.equal(packed.dequantise(start=start, stop=stop), whole[..., start:stop, :])
    for start, stop in ((0, 8), (4, 11), (8, 8)):
        part = packed.part(start, stop)
        assert torch.equal(part.dequantise(), whole[..., start:stop, :])
        assert part.codes.untyped_storage().data_ptr() == packed.codes.untyped_storage().data_ptr()
    if dim == -2:
        with pytest.raises(ValueError, match="rows 3 to 8 are no whole groups of 4"):
            packed.part(3, 8)


def test_two_bits_in_groups_of_32_cost_three() -> None:
    x = torch.randn(1, 2, 64, 64)
    for dim in (-2, -1):
        assert quantise(x, 2, 32, dim).nbytes * 8 == 3 * x.numel()
        assert quantise(x, 2, 32, dim).dequantise(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(("bits", "group", "dim"), [(3, 4, -1), (2, 0, -1), (2, 4, 0)])
def test_what_is_refused(bits: int, group: int, dim: int) -> None:
    with pytest.raises(ValueError, match="bits are 2, 4 or 8"):
        quantise(torch.zeros(2, 2), bits, group, dim)
