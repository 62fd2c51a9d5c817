from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvexp.methods.eviction.selection import choose, over_group, share

numbers = st.lists(st.integers(0, 5), min_size=1, max_size=12)


@given(
    numbers,
    st.integers(1, 12),
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.sets(st.integers(0, 11)),
)
def test_choose_is_what_a_sort_says(scores: list[int], rows: int, real: list[bool], always: set[int]) -> None:
    """Few distinct scores, so that ties abound."""
    size = len(scores)
    valid = torch.tensor(real[:size])[None, None]
    forced = torch.tensor([i in always for i in range(size)])[None, None]
    kept, counted = choose(torch.tensor(scores, dtype=torch.float32)[None, None], [[rows]], valid, forced)
    found = kept[0, 0] if counted is None else kept[0, 0][counted[0, 0]]
    order = sorted(
        (i for i in range(size) if real[i]), key=lambda i: (i not in always, i in always or -scores[i], i)
    )  # rows that are always kept have no score
    assert found.tolist() == sorted(order[:rows])


def test_heads_may_keep_different_numbers() -> None:
    scores = torch.tensor([[[1.0, 3.0, 2.0], [5.0, 4.0, 6.0]]])
    kept, counted = choose(scores, [[1, 2]])
    assert kept[0, 1].tolist() == [0, 2]
    assert counted is not None and counted.tolist() == [[[False, True], [True, True]]]
    assert kept[0, 0, 1] == 1


def test_query_heads_become_one() -> None:
    scores = torch.tensor([[[1.0], [3.0], [5.0], [2.0]]])
    assert over_group(scores, 2, "mean").flatten().tolist() == [2.0, 3.5]
    assert over_group(scores, 2, "max").flatten().tolist() == [3.0, 5.0]
    assert over_group(scores, 4, "max") is scores


@given(
    st.integers(0, 60),
    st.lists(st.tuples(st.floats(0, 9), st.integers(0, 20)), min_size=1, max_size=8),
    st.integers(0, 4),
)
def test_shares_sum_exactly(total: int, parts: list[tuple[float, int]], least: int) -> None:
    weights, most = [w for w, _ in parts], [m for _, m in parts]
    given_rows = share(total, weights, most, least)
    floor = sum(min(least, top) for top in most)
    assert sum(given_rows) == max(floor, min(total, sum(most)))
    assert all(min(least, top) <= rows <= top for rows, top in zip(given_rows, most, strict=True))


@pytest.mark.parametrize(
    ("total", "weights", "most", "expected"),
    [
        (10, [1, 1], [20, 20], [5, 5]),
        (10, [3, 1], [20, 20], [8, 2]),  # 7.5 and 2.5: the lower index takes the row that is left
        (10, [3, 1], [4, 20], [4, 6]),
        (3, [1, 1, 1, 1], [9] * 4, [1, 1, 1, 0]),
        (4, [0, 0], [9, 9], [2, 2]),
        (10, [6.1, 1.95, 1.95], [9] * 3, [6, 2, 2]),  # the largest remainders, not the largest weight
    ],
)
def test_shares_by_hand(total: int, weights: list[float], most: list[int], expected: list[int]) -> None:
    assert share(total, weights, most) == expected
