from __future__ import annotations

import torch

from kvexp.methods.eviction.normalise import attention_per_query, z_scores


def test_z_scores_by_hand() -> None:
    """1, 3, 8 and 8: mean 5, squares 16 + 4 + 9 + 9, deviation sqrt(9.5). Without the last two: -1 and 1."""
    scores = torch.tensor([[[1.0, 3.0, 8.0, 8.0]]])
    torch.testing.assert_close(z_scores(scores, None), (scores - 5) / 9.5**0.5)
    some = torch.tensor([[[True, True, False, False]]])
    assert z_scores(scores, some).tolist() == [[[-1, 1, 0, 0]]]


def test_rows_left_out_do_not_count_whatever_they_hold() -> None:
    scores = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(1))
    among = torch.rand(2, 1, 9, generator=torch.Generator().manual_seed(2)) > 0.4
    found = z_scores(scores.masked_fill(~among, 1e6), among)
    for b in range(2):
        for head in range(3):
            kept = scores[b, head][among[b, 0]]
            expected = (kept - kept.mean()) / kept.std(correction=0)
            torch.testing.assert_close(found[b, head][among[b, 0]], expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(found.masked_fill(among, 0.0), torch.zeros_like(found))


def test_equal_scores_and_no_rows_at_all_give_zero() -> None:
    scores = torch.full((1, 1, 3), 2.5)
    assert z_scores(scores, None).tolist() == [[[0, 0, 0]]]
    assert z_scores(scores, torch.zeros(1, 1, 3, dtype=torch.bool)).tolist() == [[[0, 0, 0]]]


def test_a_tiny_deviation_is_clamped() -> None:
    scores = torch.tensor([[[0.0, 2e-8]]], dtype=torch.float64)
    torch.testing.assert_close(z_scores(scores, None)[0, 0], torch.tensor([-0.01, 0.01]).double())


def test_attention_per_query_by_hand() -> None:
    """The second row was seen by one of two queries only: its mean is over that one."""
    probabilities = torch.tensor([[[[1.0, 0.0, 0.0], [0.25, 0.5, 0.25]]]])
    visible = torch.tensor([[[[True, False, False], [True, True, False]]]])
    assert attention_per_query(probabilities, visible).tolist() == [[[0.625, 0.5, 0.0]]]
