from __future__ import annotations

from math import pi

import pytest
import torch

from kvexp.attention.bands import Bands
from kvexp.methods.eviction.gaussian import Gaussian, expected_logits, measured, upcoming

NUMBERS = torch.Generator().manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=NUMBERS)


def covariance(vectors: torch.Tensor) -> torch.Tensor:
    """Mean outer product of centred vectors [n, D], one by one, in float64."""
    x = vectors.double()
    return sum((torch.outer(v, v) for v in x - x.mean(0)), torch.zeros(x.shape[1], x.shape[1])) / len(x)


@pytest.mark.parametrize("cuts", [[50], [1, 49], [7, 1, 20, 22]])
def test_parts_give_the_statistics_of_the_whole(cuts: list[int]) -> None:
    """Also far from zero, where a sum of squares less the square of the sum would lose everything."""
    vectors, counted = random(2, 3, 50, 4) + 1000.0, torch.rand(2, 50, generator=NUMBERS) > 0.4
    found: Gaussian | None = None
    for part, mask in zip(vectors.split(cuts, dim=2), counted.split(cuts, dim=1), strict=True):
        more = measured(part, mask)
        found = more if found is None else found.merged(more)
    assert found is not None and found.count.tolist() == counted.sum(1).tolist()
    for b in range(2):
        for h in range(3):
            mine = vectors[b, h, counted[b]]
            torch.testing.assert_close(found.mean[b, h], mine.mean(0), atol=1e-3, rtol=0)
            expected = covariance(mine).float()
            torch.testing.assert_close(found.covariance[b, h], expected, atol=1e-2, rtol=1e-2)


def test_one_context_joins_a_batch_and_nothing_seen_is_nothing() -> None:
    context, queries = random(1, 2, 9, 4), random(3, 2, 5, 4)
    none = torch.zeros(3, 5, dtype=torch.bool)
    before = measured(context, torch.ones(1, 9, dtype=torch.bool))
    same = before.merged(measured(queries, none))
    torch.testing.assert_close(same.mean, before.mean.expand(3, -1, -1))
    torch.testing.assert_close(same.scatter, before.scatter.expand(3, -1, -1, -1))
    after = before.merged(measured(queries, ~none))
    for b in range(3):
        together = torch.cat([context[0], queries[b]], dim=1)
        torch.testing.assert_close(after.mean[b], together.mean(1))
        torch.testing.assert_close(after.covariance[b, 1], covariance(together[1]).float())
    empty = measured(queries, none)
    assert not empty.mean.any() and not empty.covariance.any()


def test_logits_by_hand() -> None:
    """Mean (2, 0), variance 1 in the first direction: key (1, 5) gives 2 + 1/2, key (2, 0) 4 + 4/2.

    At scale 1/2: 1 + 1/8 and 2 + 4/8.
    """
    mean, spread = torch.tensor([[[2.0, 0.0]]]), torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]])
    keys = torch.tensor([[[[1.0, 5.0], [2.0, 0.0]]]])
    assert expected_logits(keys, mean, spread, 1.0).tolist() == [[[2.5, 6.0]]]
    assert expected_logits(keys, mean, spread, 0.5).tolist() == [[[1.125, 2.5]]]
    assert expected_logits(keys, mean, None, 1.0).tolist() == [[[2.0, 4.0]]]


def test_logits_are_the_log_of_the_mean_weight_of_gaussian_queries() -> None:
    mean, root, keys = random(3), random(3, 3) * 0.4, random(6, 3)
    queries = mean + random(400_000, 3) @ root.T
    sampled = (queries @ keys.T * 0.7).exp().mean(0).log()
    spread = (root @ root.T)[None, None]
    found = expected_logits(keys[None, None], mean[None, None], spread, 0.7)[0, 0]
    torch.testing.assert_close(found, sampled, atol=0.02, rtol=0)


def test_heads_of_a_group_read_the_same_keys() -> None:
    keys, mean, root = random(2, 2, 1500, 4), random(2, 6, 4), random(2, 6, 4, 4)
    spread = root @ root.mT
    found = expected_logits(keys, mean, spread, 0.5)
    for head in range(6):
        one = keys[1, head // 3]
        expected = 0.5 * one @ mean[1, head] + 0.125 * ((one @ spread[1, head]) * one).sum(-1)
        torch.testing.assert_close(found[1, head], expected, atol=1e-4, rtol=1e-4)


def test_rotation_by_hand() -> None:
    """A quarter turn for each token. The mean of no turn and one: (1, 0) becomes (1/2, 1/2).

    A variance along (1, 0) then lies along (1, 1), and is half as large: 1/4 everywhere. From position 1 on
    all that is turned once more: (-1/2, 1/2).
    """
    quarter = Bands(torch.tensor([pi / 2], dtype=torch.float64))
    ones = torch.ones(1)
    queries = Gaussian(ones, torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]]))
    mean, spread = upcoming(queries, quarter, torch.tensor([0]), 2)
    torch.testing.assert_close(mean, torch.tensor([[[0.5, 0.5]]]))
    torch.testing.assert_close(spread, torch.full((1, 1, 2, 2), 0.25))
    mean, spread = upcoming(queries, quarter, torch.tensor([1]), 2)
    torch.testing.assert_close(mean, torch.tensor([[[-0.5, 0.5]]]))
    torch.testing.assert_close(spread, torch.tensor([[[[0.25, -0.25], [-0.25, 0.25]]]]))
    scaled = Bands(torch.tensor([pi / 2], dtype=torch.float64), scaling=3.0)
    torch.testing.assert_close(upcoming(queries, scaled, torch.tensor([1]), 2)[1], 9 * spread)
