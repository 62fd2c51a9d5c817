from __future__ import annotations

from typing import Any

import pytest
import torch

import helpers
from evict import PROMPTS, Event, Reference, by_hand, hold, layer_by_hand, top, watched
from kvexp import instantiate
from kvexp.budget import Budget
from kvexp.errors import UserError
from kvexp.methods.eviction.base import EvictionMethod
from kvexp.methods.eviction.expected_attention import ExpectedAttention
from kvexp.methods.eviction.h2o import H2O
from kvexp.methods.eviction.knorm import Knorm
from kvexp.methods.eviction.rkv import RKV
from kvexp.methods.eviction.snapkv import SnapKV
from kvexp.methods.eviction.streaming_llm import StreamingLLM
from kvexp.methods.eviction.two_phase import TwoPhase


def both(first: EvictionMethod, second: EvictionMethod) -> TwoPhase:
    return TwoPhase(at_prefill=first, at_decode=second)


STREAM = StreamingLLM(sinks=2)
NORM = Knorm(interval=4)


def norms(budget: int) -> Reference:
    return lambda events: [
        [
            top(-key.float().norm(dim=-1), at, budget)
            for key, at in zip(event.keys, event.positions, strict=True)
        ]
        for event in now(events)
    ]


def stream(budget: int) -> Reference:
    return lambda events: [
        [top(torch.tensor(at), at, budget, range(2)) for at in event.positions] for event in now(events)
    ]


def now(events: list[Event]) -> list[Event]:
    return [event for event in events if event.forward == events[-1].forward]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS])
def test_each_part_decides_in_its_phase(prompts: list[Any], dtype: torch.dtype) -> None:
    for method, first, second in (
        (both(Knorm(), STREAM), norms(12), stream(12)),
        (both(STREAM, NORM), stream(12), norms(12)),
    ):
        for events in watched(method, "qwen3", prompts, 12, 10, dtype):
            assert hold([event for event in events if event.reading], first) == 2
            assert hold([event for event in events if not event.reading], second) >= 4


def test_by_hand() -> None:
    """Keys 5, 1, 4, 1, 3: the shortest three are 1, 3, 4; then the latest two beside the first stay.

    With the parts exchanged: 0, 3, 4 (the first and the latest two), of lengths 5, 1, 3, and a decoded key of
    length 2 pushes the 5 out.
    """
    keys = torch.tensor([[[5.0, 0.0], [1.0, 0.0], [4.0, 0.0], [1.0, 0.0], [3.0, 0.0]]])
    one = torch.tensor([[[2.0, 0.0]]])
    steps = [(keys, keys, keys), (one, one, one)]
    first = both(Knorm(), StreamingLLM(sinks=1))
    assert by_hand(first, steps[:1], 3) == [[1, 3, 4]]
    assert by_hand(first, steps, 3) == [[3, 4, 5]]  # the sink has left before: the latest three
    other = both(StreamingLLM(sinks=1), Knorm(interval=1))
    assert by_hand(other, steps[:1], 3) == [[0, 3, 4]]
    assert by_hand(other, steps, 3) == [[3, 4, 5]]


def test_each_part_reads_a_window_of_its_own_size() -> None:
    """The prompt fits, so that only the second part acts, with one query of the four that the first keeps."""
    numbers = torch.Generator().manual_seed(4)
    shapes = [(2, 9, 4), (1, 9, 4), (1, 9, 4)], [(2, 1, 4), (1, 1, 4), (1, 1, 4)]
    steps = [tuple(torch.randn(*s, generator=numbers) for s in shape) for shape in shapes]
    second = RKV(window=1, balance=1.0, kernel=1, trigger="slack", interval=1)
    method = both(SnapKV(window=4), second)
    assert method.window_size == 4
    assert by_hand(method, steps, 9) == by_hand(second, steps, 9)
    assert layer_by_hand(method, steps, 9).queries.slots.tolist() == [[6, 7, 8, 9]]


def test_the_second_part_has_seen_the_prompt() -> None:
    """H2O while decoding has the attention that rows received in the prompt."""
    numbers = torch.Generator().manual_seed(5)
    step = tuple(torch.randn(2, 8, 4, generator=numbers) for _ in range(3))
    h2o = H2O(interval=1, recent_percent=None, recent=2)
    layer = layer_by_hand(both(Knorm(), h2o), [step], 5)
    full = layer_by_hand(h2o, [step], 100)  # nothing left: what all rows received
    kept = layer.positions.long()
    assert torch.equal(layer.tracks["received"], full.tracks["received"].gather(2, kept))
    assert layer.tracks["received"].sum() > 2


def test_parts_that_only_follow_are_told_while_they_need_it() -> None:
    model = helpers.model("llama")
    method = both(ExpectedAttention(), Knorm(interval=4))
    assert method.taps and method.follows and not method.observes
    cache: Any = method.encode(model, helpers.context(), budget=12)
    alone: Any = ExpectedAttention().encode(model, helpers.context(), budget=12)
    for ours, theirs in zip(cache.layers, alone.layers, strict=True):
        assert torch.equal(ours.positions, theirs.positions) and not ours.remembered


def test_built_from_names_and_knobs() -> None:
    target = {"_target_": "kvexp.methods.eviction.two_phase.TwoPhase"}
    given = {"at_prefill": {"name": "knorm", "skip_layers": 1}, "at_decode": "streaming_llm"}
    built = instantiate.build("method", "two_phase", {**target, **given})
    assert built == both(Knorm(skip_layers=1), StreamingLLM())
    assert instantiate.build("method", "two_phase", target) == both(SnapKV(), RKV())
    with pytest.raises(UserError, match="at_decode=asm is not possible"):
        instantiate.build("method", "two_phase", {**target, "at_decode": "asm"})
    with pytest.raises(UserError, match=r"there is no 'method.interval'"):
        instantiate.build("method", "two_phase", {**target, "interval": 4})


def test_query_aware_is_that_of_the_first_part() -> None:
    model = helpers.model("llama")
    waiting = both(Knorm(query_aware=True), STREAM).encode(model, helpers.context(), budget=12)
    assert waiting.entries() == [45] * 3 and waiting.evictor.phase == "pending"
    assert both(Knorm(), STREAM).encode(model, helpers.context(), budget=12).entries() == [12] * 3


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ((Knorm(), Knorm()), r"at_decode=knorm never acts .*'method.at_decode={name: knorm, interval: 128}'"),
        ((Knorm(prefill="off"), STREAM), "at_prefill never acts with prefill=off"),
        ((TwoPhase(), STREAM), "at_prefill=two_phase cannot be a part"),
        ((Knorm(), StreamingLLM(rope="in_cache")), "at_decode needs the whole cache for rope=in_cache"),
        ((H2O(), H2O()), "both parts are h2o, whose notes would mix: take method=h2o"),
    ],
)
def test_parts_are_refused(parts: tuple[Any, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        both(*parts)


def test_budgets_hold_for_both_parts() -> None:
    with pytest.raises(UserError, match="budget=8 leaves rkv nothing to choose"):
        both(Knorm(), RKV()).check_budget(Budget(8))
    both(Knorm(), RKV()).check_budget(Budget(9))
