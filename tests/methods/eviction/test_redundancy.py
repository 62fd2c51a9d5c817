from __future__ import annotations

import pytest
import torch

from kvexp.methods.eviction import redundancy as module
from kvexp.methods.eviction.redundancy import redundancy


def slow(keys: torch.Tensor, threshold: float) -> list[float]:
    """The same for keys [S, D], pair by pair."""
    rows = len(keys)
    similar = [
        [0.0 if i == j else float(keys[i] @ keys[j] / keys[i].norm() / keys[j].norm()) for j in range(rows)]
        for i in range(rows)
    ]
    for row in similar:
        above = [j for j in range(rows) if row[j] > threshold]
        if above:
            row[above[-1]] = 0.0
    return [sum(row[j] for row in similar) / rows for j in range(rows)]


def test_by_hand() -> None:
    """Three equal keys and one at a right angle, which is like none.

    Key 0 spares key 2 and counts against 1, key 1 spares 2 and counts against 0, key 2 spares 1 and counts
    against 0: sums 2, 1, 0, 0 over four rows.
    """
    keys = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [0.0, 1.0]])[None, None]
    assert redundancy(keys, None, 0.5).tolist() == [[[0.5, 0.25, 0.0, 0.0]]]


def test_opposite_keys_by_hand() -> None:
    """Two equal keys and their opposite: the pair spare each other, the opposite has -1 with each of them."""
    keys = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])[None, None]
    torch.testing.assert_close(redundancy(keys, None, 0.5)[0, 0], torch.tensor([-1.0, -1.0, -2.0]) / 3)
    torch.testing.assert_close(redundancy(keys, None, 1.5)[0, 0], torch.tensor([0.0, 0.0, -2.0]) / 3)


@pytest.mark.parametrize("pairs", [1, 90, 1 << 23])
@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.9])
def test_equals_pair_by_pair_in_blocks_of_any_size(
    pairs: int, threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAIRS", pairs)
    keys = torch.randn(2, 3, 11, 4, generator=torch.Generator().manual_seed(1))
    found = redundancy(keys, None, threshold)
    for b in range(2):
        for h in range(3):
            expected = torch.tensor(slow(keys[b, h], threshold))
            torch.testing.assert_close(found[b, h], expected, atol=1e-6, rtol=0)


def test_rows_that_do_not_count_take_no_part() -> None:
    keys = torch.randn(1, 1, 9, 4, generator=torch.Generator().manual_seed(2))
    valid = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1, 1], dtype=torch.bool)[None, None]
    found = redundancy(keys, valid, 0.3)
    alone = redundancy(keys[:, :, valid[0, 0]], None, 0.3)
    torch.testing.assert_close(found[valid], alone[0, 0], atol=1e-6, rtol=0)
    assert found[~valid].tolist() == [0.0] * 3


def test_low_precision_is_compared_in_float32() -> None:
    keys = torch.randn(1, 2, 30, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert torch.equal(redundancy(keys, None, 0.5), redundancy(keys.float(), None, 0.5))
    assert redundancy(keys.double(), None, 0.5).dtype == torch.float64
