"""Columns of packed rows grow without touching what they started with; schemes say what is packed when."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvexp.cache.packing import Column, quantise
from kvexp.cache.scheme import Scheme


@given(
    dim=st.sampled_from([-2, -1]),
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    fork=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_rows_appended_in_parts_are_the_rows_at_once(dim: int, counts: list[int], fork: bool) -> None:
    rows = torch.randn(2, 3, 4 * sum(counts), 5, generator=torch.Generator().manual_seed(0))
    column, at = Column(), 0
    for count in counts:
        if fork:  # the parent goes on with other rows, which must not show
            parent, column = column, Column(column.packed)
            parent.append(quantise(-rows[:, :, :4], 4, 4, dim))
        column.append(quantise(rows[:, :, at : at + 4 * count], 4, 4, dim))
        at += 4 * count
        whole = quantise(rows[:, :, :at], 4, 4, dim)
        assert column.packed is not None and column.rows == at
        for ours, theirs in zip(column.packed.tensors(), whole.tensors(), strict=True):
            assert torch.equal(ours, theirs)
    assert column.packed is not None and column.packed.nbytes == whole.nbytes  # room is not counted


def test_appending_writes_into_room_that_is_left() -> None:
    row, column = quantise(torch.ones(1, 1, 1, 8), 2, 8, -1), Column()
    for _ in range(2):
        column.append(row)
    assert column.packed is not None
    place = column.packed.codes.data_ptr()
    for _ in range(50):
        column.append(row)
    assert column.packed.codes.data_ptr() == place and column.rows == 52


def test_the_first_rows_widen_to_a_batch() -> None:
    one, more = (quantise(torch.randn(b, 2, 4, 6), 8, 4, -2) for b in (1, 3))
    column = Column(one.each(lambda x: x.expand(3, *x.shape[1:])))
    column.append(more)
    assert column.packed is not None
    back = column.packed.dequantise()
    assert torch.equal(back[:, :, :4], one.dequantise().expand(3, -1, -1, -1))
    assert torch.equal(back[:, :, 4:], more.dequantise())


@pytest.mark.parametrize(
    ("scheme", "packed"),
    [
        # KIVI: keys R = 8 at a time, so that n mod 8 are left; values when 8 newer ones have come.
        (
            Scheme(2, 4, 8),
            {0: (0, 0), 7: (0, 0), 8: (8, 0), 9: (8, 1), 15: (8, 7), 16: (16, 8), 21: (16, 13)},
        ),
        # OTT: blocks of 8 rows, once 3 newer ones have come.
        (Scheme(2, 8, 3, blockwise=True), {0: (0, 0), 10: (0, 0), 11: (8, 8), 18: (8, 8), 19: (16, 16)}),
        (Scheme(2, 8, 0, blockwise=True), {7: (0, 0), 8: (8, 8), 17: (16, 16)}),
    ],
)
def test_what_is_packed_when(scheme: Scheme, packed: dict[int, tuple[int, int]]) -> None:
    assert {rows: scheme.packed(rows) for rows in packed} == packed


def test_schemes_that_are_refused() -> None:
    with pytest.raises(ValueError, match="6 rows at a time are no whole groups of 4"):
        Scheme(2, 4, 6)
    with pytest.raises(ValueError, match="0 rows at a time"):
        Scheme(2, 4, 0)
    for blockwise, outliers in ((False, 1), (True, 4)):
        with pytest.raises(ValueError, match="outliers are sought in blocks of more rows"):
            Scheme(2, 4, 4, blockwise, outliers)
