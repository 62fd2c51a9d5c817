from __future__ import annotations

import pytest
import torch

import helpers
from evict import PROMPTS, Event, Reference, by_hand, each_setting, hold, top, watched
from kvexp.errors import UserError
from kvexp.methods.eviction.knorm import Knorm


def reference(budget: int) -> Reference:
    def kept(events: list[Event]) -> list[list[list[int]]]:
        last = [event for event in events if event.forward == events[-1].forward]
        return [
            [
                top(-key.float().pow(2).sum(-1).sqrt(), positions, budget)
                for key, positions in zip(event.keys, event.positions, strict=True)
            ]
            for event in last
        ]

    return kept


@each_setting
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_keeps_what_the_reference_keeps(family: str, dtype: torch.dtype) -> None:
    for prompts in (PROMPTS[:1], PROMPTS):
        events = watched(Knorm(interval=4), family, prompts, 12, 10, dtype)
        assert len(events) == len(prompts)
        for sequence in events:
            assert hold(sequence, reference(12)) >= 2


def test_by_hand() -> None:
    """Keys of length 5, 1, 2, 2, 9: the shortest stay, and of equal ones the first."""
    lengths = torch.tensor([5.0, 1.0, 2.0, 2.0, 9.0])
    keys = torch.stack([torch.zeros(5), lengths], dim=-1)[None]  # [1, 5, 2]
    step = keys, keys, keys
    assert by_hand(Knorm(), [step], 2) == [[1, 2]]
    assert by_hand(Knorm(), [step], 4) == [[0, 1, 2, 3]]
    one = torch.tensor([[[3.0, 0.0]]])  # a decoded key of length 3 pushes the 5 out, then itself stays
    assert by_hand(Knorm(interval=1), [step, (one, one, one)], 4) == [[1, 2, 3, 5]]
    assert by_hand(Knorm(recent=1), [step], 2) == [[1, 4]]


def skipping(budget: int, skip: int) -> Reference:
    """The other layers share what the skipped ones leave; the first of them take the remainder."""

    def kept(events: list[Event]) -> list[list[list[int]]]:
        found = []
        for event in (event for event in events if event.forward == events[-1].forward):
            left = event.n_layers * budget - skip * event.upcoming
            rows = [event.upcoming] * skip + [0] * (event.n_layers - skip)
            for i in range(left):
                rows[skip + i % (event.n_layers - skip)] += 1
            found.append(
                [
                    top(-key.float().norm(dim=-1), positions, rows[event.place])
                    for key, positions in zip(event.keys, event.positions, strict=True)
                ]
            )
        return found

    return kept


@each_setting
def test_skipped_layers_keep_everything(dtype: torch.dtype) -> None:
    for prompts in (PROMPTS[:1], PROMPTS):
        for sequence in watched(Knorm(interval=4, skip_layers=1), "llama", prompts, 25, 10, dtype):
            assert hold(sequence, skipping(25, 1)) >= 4
            assert not any(event.evicts for event in sequence if event.place == 0)
            last = [event for event in sequence if event.reading]
            assert sum(len(event.kept[0]) for event in last) == 3 * 25


@pytest.mark.parametrize("skip", range(6))
def test_the_mean_over_layers_is_the_budget(skip: int) -> None:
    method = Knorm(skip_layers=skip)
    for rows in (7, 20, 31):
        for length in range(1, 60):
            try:
                layers = [method.layer_rows(i, 7, rows, length) for i in range(7)]
            except UserError:
                assert 7 * rows - skip * length < 7 - skip
                continue
            if length <= rows:
                assert layers == [rows] * 7
                continue
            assert sum(layers) == 7 * rows and layers[:skip] == [length] * skip
            assert max(layers[skip:]) - min(layers[skip:]) <= 1 and min(layers) >= 1
            assert layers[skip:] == sorted(layers[skip:], reverse=True)


def test_skipped_layers_are_refused_where_they_leave_nothing() -> None:
    with pytest.raises(UserError, match=r"method.skip_layers=-1 is no number of layers: use 0 or more"):
        Knorm(skip_layers=-1)
    with pytest.raises(UserError, match=r"method.skip_layers=3 leaves no layer .* fewer than the 3 layers"):
        Knorm(skip_layers=3).encode(helpers.model("llama"), helpers.context(), budget=40)
    # 45 tokens in each of 2 of 3 layers, and a row in the third, are 91 rows: 31 for each layer on average.
    with pytest.raises(
        UserError, match=r"cannot hold 45 tokens whole in 2 of 3 layers: use budget=31 or more"
    ):
        Knorm(skip_layers=2).encode(helpers.model("llama"), helpers.context(), budget=30)
    cache = Knorm(skip_layers=2).encode(helpers.model("llama"), helpers.context(), budget=31)
    assert cache.entries() == [45, 45, 3]
