from __future__ import annotations

import pytest
import torch

from kvexp.methods.eviction.pages import Pages

GAPS = torch.tensor([[[0, 1, 4, 5, 6, 9, 10, 11, 14]]])


def test_pages_are_counted_from_the_end_of_the_prompt() -> None:
    """Seven tokens of a prompt in pages of 3: 0 | 1 2 3 | 4 5 6, then 7 8 9 | 10 11 12 | 13 14 15."""
    pages = Pages(GAPS, torch.tensor([7]), 3, None)
    assert pages.numbers.tolist() == [[[0, 1, 2, 2, 2, 3, 4, 4, 5]]]
    assert pages.exist(decoded=True).tolist() == [[[False] * 3 + [True] * 3]]


def test_rows_that_do_not_count_are_no_page() -> None:
    """Pads lie in front of and between rows; their positions say nothing."""
    positions = torch.tensor([[[0, 0, 1, 2, 0, 0, 3, 4]], [[0, 1, 2, 3, 4, 5, 6, 7]]])
    valid = torch.tensor([[[0, 1, 1, 1, 0, 0, 1, 1]], [[1] * 8]]).bool()
    pages = Pages(positions, torch.tensor([2, 4]), 2, valid)
    assert pages.numbers.tolist() == [[[4, 0, 0, 1, 4, 4, 1, 2]], [[0, 0, 1, 1, 2, 2, 3, 3]]]
    assert pages.exist().tolist() == [[[True, True, True, False]], [[True] * 4]]
    values = torch.arange(8.0).expand(2, 1, 8)
    assert pages.largest(values).tolist() == [[[2, 6, 7, float("-inf")]], [[1, 3, 5, 7]]]
    assert pages.spread(torch.tensor([[[5.0, 6, 7, 8]]] * 2))[0].tolist() == [[0, 5, 5, 6, 0, 0, 6, 7]]


@pytest.mark.parametrize("heads", [2, 4])
def test_bounds_equal_a_loop_and_hold(heads: int) -> None:
    """Rows of one stored head or of two, read by `heads` heads of keys; 8 query heads."""
    torch.manual_seed(0)
    valid = torch.ones(2, 1, 9, dtype=torch.bool)
    valid[1, 0, :2] = False
    pages = Pages(GAPS.expand(2, 1, 9), torch.tensor([7, 8]), 3, valid)
    queries, keys = torch.randn(2, 8, 5), torch.randn(2, heads, 9, 5)
    bounds = pages.bounds(queries, keys)
    products = queries[:, :, None] @ keys.repeat_interleave(8 // heads, 1).transpose(2, 3)
    for b in range(2):
        for h in range(8):
            for page in range(pages.count):
                rows = [i for i in range(9) if pages.numbers[b, 0, i] == page]
                if not rows:
                    assert bounds[b, h, page] == -torch.inf
                    continue
                mine = keys[b, h // (8 // heads), rows]
                per_channel = (queries[b, h] * mine).amax(0)  # the product is linear: an extreme is largest
                torch.testing.assert_close(bounds[b, h, page], per_channel.sum())
                assert bounds[b, h, page] >= products[b, h, 0, rows].max() - 1e-5
