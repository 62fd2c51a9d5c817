from __future__ import annotations

import math

import pytest
import torch

from kvexp.tasks.sampling import Sampler

PROBABILITIES = torch.tensor([0.5, 0.3, 0.15, 0.05])
LOGITS = PROBABILITIES.log()[None]


def frequencies(temperature: float, top_p: float, draws: int = 4000) -> torch.Tensor:
    sampler = Sampler(["stream"], temperature, top_p)
    drawn = torch.cat([sampler(LOGITS) for _ in range(draws)])
    return torch.bincount(drawn, minlength=4) / draws


def test_tokens_come_as_often_as_they_are_likely() -> None:
    torch.testing.assert_close(frequencies(1.0, 1.0), PROBABILITIES, atol=0.03, rtol=0)


def test_temperature_sharpens() -> None:
    """At temperature 1/2 probabilities are squared and scaled to sum to 1."""
    squared = PROBABILITIES.square()
    torch.testing.assert_close(frequencies(0.5, 1.0), squared / squared.sum(), atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.4, [1.0, 0, 0, 0]), (0.5, [1.0, 0, 0, 0]), (0.79, [5 / 8, 3 / 8, 0, 0])]
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, kept: list[float]) -> None:
    torch.testing.assert_close(frequencies(1.0, top_p), torch.tensor(kept), atol=0.03, rtol=0)


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    together, alone = Sampler(["a", "b", "c"], 0.8, 0.95), Sampler(["b"], 0.8, 0.95)
    for _ in range(20):
        assert together(logits)[1] == alone(logits[1:2])[0]
    assert math.isclose(
        Sampler(["b"], 1.0, 1.0).streams[0].random(), alone.__class__(["b"], 1, 1).streams[0].random()
    )


def test_a_number_that_rounds_to_one_draws_a_token_that_may_be_drawn() -> None:
    class Highest:
        def random(self) -> float:
            return 1 - 2.0**-53

    sampler = Sampler(["stream"], 1.0, 0.5)
    sampler.streams = [Highest()]  # type: ignore[list-item]
    assert sampler(LOGITS).tolist() == [0]  # the only one that top_p leaves
