from __future__ import annotations

from typing import Any

import pytest
import torch

from evict import PROMPTS, Event, Reference, by_hand, each_setting, hold, top, watched
from kvexp import instantiate
from kvexp.budget import Budget
from kvexp.errors import UserError
from kvexp.methods.eviction.h2o import H2O
from kvexp.methods.eviction.knorm import Knorm
from kvexp.methods.eviction.snapkv import SnapKV
from kvexp.methods.eviction.tova import TOVA
from kvexp.methods.eviction.vatp import VATP
from received import Received


def size(values: torch.Tensor, row: int) -> float:
    """The L1 norm of a value."""
    return sum(abs(x) for x in values[row].tolist())


def reference(budget: int, sinks: int, recent: int) -> Reference:
    received = Received()

    def kept(events: list[Event]) -> list[list[list[int]]]:
        received.follow(events)
        found = []
        for event in (event for event in events if event.forward == events[-1].forward):
            always = [*range(sinks), *range(event.upcoming - recent, event.upcoming)]
            heads = []
            for kv, positions in enumerate(event.positions):
                mass = received.mass[event.place, kv]
                scores = [mass[p] * size(event.values[kv], row) for row, p in enumerate(positions)]
                heads.append(top(torch.tensor(scores), positions, budget, always))
            found.append(heads)
        return found

    return kept


@each_setting
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_keeps_what_the_reference_keeps(family: str, dtype: torch.dtype) -> None:
    for prompts in (PROMPTS[:1], PROMPTS):
        events = watched(VATP(sinks=3), family, prompts, 14, 8, dtype)
        assert len(events) == len(prompts)
        for sequence in events:
            assert hold(sequence, reference(14, sinks=3, recent=7)) >= 14


def latest(budget: int, group: str) -> Reference:
    """Keep by the last query's attention of each query head times the value, the group's mean or largest."""

    def kept(events: list[Event]) -> list[list[list[int]]]:
        found = []
        for event in (event for event in events if event.forward == events[-1].forward):
            heads = []
            for kv, positions in enumerate(event.positions):
                members = range(kv * event.group, (kv + 1) * event.group)
                shares = torch.stack([event.probabilities(head)[-1] for head in members])
                joined = shares.mean(0) if group == "mean" else shares.amax(0)
                sizes = torch.tensor([size(event.values[kv], row) for row in range(len(positions))])
                always = [0, 1, event.upcoming - 1]
                heads.append(top(joined * sizes, positions, budget, always))
            found.append(heads)
        return found

    return kept


@pytest.mark.parametrize("group", ["mean", "max"])
def test_scores_of_query_heads_are_weighed_by_their_kv_head(group: Any) -> None:
    """SnapKV with one query and no pooling gives scores of query heads; its window row stays."""
    method = VATP(base=SnapKV(window=1, kernel=1), sinks=2, group=group)
    for sequence in watched(method, "qwen3", PROMPTS, 9, 5):
        assert hold(sequence, latest(9, group)) >= 8


def prompt(values: list[float]) -> tuple[Any, Any, Any]:
    """Rows of equal keys, so that each query spreads its attention evenly over what it sees."""
    zeros = torch.zeros(1, len(values), 1)
    return zeros, zeros, torch.tensor([[[value] for value in values]])


def test_by_hand() -> None:
    """Equal keys receive 2.08, 1.08, 0.58, 0.25; with values 1, 1, -3 and 2 that is 2.08, 1.08, 1.75, 0.5.

    So rows 0 and 2 stay, where H2O keeps 0 and 1; with two sinks and a budget of 3 the best of the others is
    row 2. A decoded row gets a fifth of the attention, as do the others, which makes 2.28 of row 0 and 2.35
    of row 2. A value of 10 has 2.0 and leaves; one of 12 has 2.4 and takes the place of row 0.
    """
    step = prompt([1.0, 1.0, -3.0, 2.0])
    base = H2O(recent_percent=0)
    assert by_hand(base, [step], 2) == [[0, 1]]
    assert by_hand(VATP(base=base, sinks=0), [step], 2) == [[0, 2]]
    assert by_hand(VATP(base=base, sinks=2), [step], 3) == [[0, 1, 2]]
    assert by_hand(VATP(base=base, sinks=0, prefill="off"), [step, prompt([10.0])], 2) == [[0, 2]]
    assert by_hand(VATP(base=base, sinks=0, prefill="off"), [step, prompt([12.0])], 2) == [[2, 4]]


def test_another_base_by_hand() -> None:
    """TOVA's last query gives each row a third; values of 1, 4 and 2 decide, and recent=1 pins the last."""
    step = prompt([1.0, 4.0, 2.0])
    assert by_hand(VATP(base=TOVA(), sinks=0), [step], 2) == [[1, 2]]
    assert by_hand(VATP(base=TOVA(), sinks=1), [step], 2) == [[0, 1]]
    assert by_hand(VATP(base=TOVA(), sinks=0, recent=1), [prompt([1.0, 4.0, 0.0])], 2) == [[1, 2]]
    assert by_hand(VATP(base=TOVA(), sinks=0), [prompt([1.0, 4.0, 0.0])], 2) == [[0, 1]]


def test_the_scissorhands_like_base_is_a_choice() -> None:
    scissorhands = {"name": "h2o", "window": 400, "recent_percent": None, "recent": 10}
    node = {"_target_": "kvexp.methods.eviction.vatp.VATP", "base": scissorhands}
    method = instantiate.build("method", "vatp", node)
    assert method.base == H2O(window=400, recent_percent=None, recent=10)
    assert method.window_size == 400 and not method.observes
    assert VATP().observes and VATP().window_size == 0


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"base": Knorm()}, "method.base=knorm has no plain attention"),
        ({"base": VATP()}, "method.base=vatp has no plain attention"),
        ({"base": H2O(interval=8)}, "interval=8 of method.base has no effect: write method.interval=8"),
        ({"base": H2O(prefill="off")}, "write method.prefill=off"),
        ({"recent": 4}, "set h2o's recent_percent to null"),
    ],
)
def test_refused(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        VATP(**knobs)


def test_smallest_budget_counts_the_sinks_beside_the_recent_half() -> None:
    """Of 41 rows 20 are recent and 20 sinks: one is left to choose; of 40 none."""
    VATP().check_budget(Budget(41))
    with pytest.raises(UserError, match="budget=41 or more"):
        VATP().check_budget(Budget(40))
