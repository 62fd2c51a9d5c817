"""Outlier tokens: who competes, who stays, what is packed in their place."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvexp.cache.outliers import Outliers, no_outliers
from kvexp.cache.scheme import Scheme
from storage_reference import smoothed


def block(sizes: list[float], value: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [1, 1, m, 2] with these sums of |K|, and values 10, 11, ... + value."""
    keys = torch.tensor([[size / 2, -size / 2] for size in sizes])[None, None]
    values = torch.arange(len(sizes)).float()[:, None].expand(-1, 3)[None, None] + 10 + value
    return keys, values


def rows_of(outliers: Outliers) -> list[tuple[int, bool]]:
    pairs = zip(outliers.rows[0, 0].tolist(), outliers.active[0, 0].tolist(), strict=True)
    return sorted(pair for pair in pairs if pair[0] >= 0)


def test_by_hand() -> None:
    keys, values = block([8.0, 2.0, 6.0, 4.0])
    held, smooth_keys, smooth_values = no_outliers(keys, values).exchange(keys, values, 0, count=1, pool=1)
    assert rows_of(held) == [(1, True)]
    # Row 1 is the mean of rows 0, 2 and 3: |K| = 6, value (10 + 12 + 13) / 3.
    assert smooth_keys[0, 0, :, 0].tolist() == [4, 3, 3, 2]
    torch.testing.assert_close(smooth_values[0, 0, :, 0], torch.tensor([10, 35 / 3, 12, 13]))
    assert held.keys[0, 0].tolist() == [[1, -1]] and held.values[0, 0].tolist() == [[11] * 3]

    held, *_ = held.exchange(*block([5.0, 5.0, 5.0, 5.0]), 4, count=1, pool=1)  # none is smaller
    assert rows_of(held) == [(1, True)]
    held, *_ = held.exchange(*block([5.0, 5.0, 2.0, 1.0]), 8, count=1, pool=1)  # 1 is replaced, and stays
    assert rows_of(held) == [(1, False), (11, True)]
    again, same, _ = held.exchange(*block([0.5, 5.0, 5.0, 5.0]), 12, count=1, pool=1)  # no room for 11
    assert rows_of(again) == [(1, False), (11, True)]
    assert torch.equal(same, block([0.5, 5.0, 5.0, 5.0])[0])  # what is not taken is packed as it is
    assert held.hidden(8, 16)[0, 0].tolist() == [-1, 3] and held.hidden(0, 4)[0, 0].tolist() == [1, -1]


def test_ties_go_to_the_earlier_row() -> None:
    keys, values = block([3.0, 3.0, 3.0])
    held, *_ = no_outliers(keys, values).exchange(keys, values, 0, count=2, pool=4)
    held, *_ = held.exchange(keys, values, 3, count=2, pool=4)
    assert rows_of(held) == [(0, True), (1, True)]


@given(
    heads=st.integers(1, 3),
    count=st.integers(1, 3),
    pool=st.integers(0, 5),
    blocks=st.integers(1, 5),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_equals_a_list_per_head(heads: int, count: int, pool: int, blocks: int, seed: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(2, heads, 4 * blocks, 3, generator=numbers) for _ in range(2))
    scheme, held, smooth = Scheme(2, 4, 0, True, count, pool), no_outliers(keys, values), []
    for at in range(0, 4 * blocks, 4):
        held, *part = held.exchange(keys[:, :, at : at + 4], values[:, :, at : at + 4], at, count, pool)
        smooth.append(part)
    for b in range(2):
        for h in range(heads):
            expected, kept = smoothed(keys[b, h], values[b, h], 4 * blocks, scheme)
            real = held.rows[b, h] >= 0
            rows = held.rows[b, h][real].long()
            assert set(rows.tolist()) == kept and len(rows) == len(kept) <= count + pool
            assert torch.equal(held.keys[b, h][real], keys[b, h, rows])
            assert torch.equal(held.values[b, h][real], values[b, h, rows])
            for i in range(2):
                ours = torch.cat([part[i][b, h] for part in smooth])
                torch.testing.assert_close(ours, expected[i], atol=1e-6, rtol=1e-6)


def test_what_takes_their_place_widens_no_range() -> None:
    keys, values = block([20.0, 21.0, 0.0, 23.0], value=5.0)
    _, smooth, _ = no_outliers(keys, values).exchange(keys, values, 0, count=1, pool=0)
    assert smooth[0, 0, :, 0].aminmax() == (10.0, 11.5)  # the mean of all four would be 8
