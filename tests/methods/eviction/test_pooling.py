from __future__ import annotations

import pytest
import torch

from kvexp.methods.eviction.pooling import pooled
from snap import pool


@pytest.mark.parametrize("how", ["avg", "max"])
@pytest.mark.parametrize("kernel", [1, 3, 7, 15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_pooling_of_the_rows_that_take_part(how: str, kernel: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(kernel)
    scores = torch.rand(3, 4, 11, generator=generator, dtype=dtype)
    among = torch.rand(3, 4, 11, generator=generator) < 0.6
    among[0], among[1, 0] = True, False
    ours = pooled(scores, among, kernel, how)
    assert ours.dtype == dtype
    for b in range(3):
        for n in range(4):
            there = among[b, n].nonzero().flatten().tolist()
            expected = torch.zeros(11, dtype=dtype)
            for i, score in zip(there, pool(scores[b, n, there].tolist(), kernel, how), strict=True):
                expected[i] = score
            torch.testing.assert_close(ours[b, n], expected)


def test_one_mask_serves_all_heads() -> None:
    scores = torch.rand(2, 4, 6)
    mask = torch.tensor([True, False, True, True, True, False])[None, None]
    together = pooled(scores, mask, 3, "max")
    assert torch.equal(together, pooled(scores, mask.expand(2, 4, 6), 3, "max"))


def test_by_hand() -> None:
    """Without the pad, 6 0 3 are 6 6 3 by maximum of 3, and 2 3 1 by average: the ends divide by 3 too."""
    scores = torch.tensor([[[6.0, 9.0, 0.0, 3.0]]])
    among = torch.tensor([[[True, False, True, True]]])
    assert pooled(scores, among, 3, "max").tolist() == [[[6.0, 0.0, 6.0, 3.0]]]
    assert pooled(scores, among, 3, "avg").tolist() == [[[2.0, 0.0, 3.0, 1.0]]]
