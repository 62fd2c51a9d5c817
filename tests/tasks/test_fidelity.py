from __future__ import annotations

import pytest
import torch

from kvexp.tasks.fidelity import compared, token_scores


def test_token_scores_are_those_of_whole_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    full, ours = (torch.randn(37, 50, generator=generator) * 4 for _ in range(2))
    following = torch.randint(50, (37,), generator=generator)
    found = token_scores(full, ours, following)
    p, q = full.log_softmax(-1), ours.log_softmax(-1)
    torch.testing.assert_close(found["kl"], (p.exp() * (p - q)).sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found["nll"], -q[torch.arange(37), following])
    torch.testing.assert_close(found["nll_full"], -p[torch.arange(37), following])
    assert torch.equal(found["top1_agreement"], (p.argmax(-1) == q.argmax(-1)).float())
    assert token_scores(full, full, following)["kl"].max() < 1e-5


def test_by_hand() -> None:
    """p = (1/2, 1/2), q = (1/4, 3/4): KL is log 2 - (log 3) / 2, and q's answer is the second."""
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    found = compared(p, q)
    assert found["kl"] == pytest.approx(0.14384, abs=1e-5)
    assert found["top1_agreement"] == 0.0
