from __future__ import annotations

from typing import Any

import pytest
import torch

import helpers
from evict import PROMPTS, Event, Reference, by_hand, each_setting, hold, top, watched
from kvexp.attention import bands as bands_module
from kvexp.attention.bands import Bands
from kvexp.attention.options import Options, set_options
from kvexp.attention.rope import rotate
from kvexp.errors import UserError
from kvexp.methods.eviction.adakv import AdaKV
from kvexp.methods.eviction.base import EvictionMethod
from kvexp.methods.eviction.expected_attention import ExpectedAttention

FAMILIES = ["llama", "qwen3"]


def mean_rotation(family: str, start: int, ahead: int, layer: int) -> torch.Tensor:
    """R [D, D] in float64: what happens to each unit vector on average."""
    model = helpers.model(family)
    width = model.config.head_dim
    unit = torch.eye(width)[None, :, None].expand(1, width, ahead, width)
    turned = rotate(model, unit, torch.arange(start, start + ahead), layer, scaled=True)
    return turned[0].double().mean(1).T


def scores(
    family: str, events: list[Event], event: Event, kv: int, ahead: int, spread: bool, norm: bool, sinks: int
) -> torch.Tensor:
    """Expected attention times value norms, head by head, in float64."""
    mine = [one for one in events if one.place == event.place]
    keys, values = event.keys[kv].double(), event.values[kv].double()
    free = torch.tensor([p >= sinks for p in event.positions[kv]])
    rotation = mean_rotation(family, event.upcoming, ahead, event.place)
    found = torch.zeros(len(keys), dtype=torch.float64)
    for head in range(kv * event.group, (kv + 1) * event.group):
        queries = torch.cat(
            [
                one.queries_pre[head, n].double()[None]
                for one in mine
                for n, position in enumerate(one.query_positions)
                if position >= sinks
            ]
        )
        mean = queries.mean(0)
        covariance = sum(torch.outer(q - mean, q - mean) for q in queries) / len(queries)
        mean, covariance = rotation @ mean, rotation @ covariance @ rotation.T
        logits = torch.stack(
            [
                event.scale * mean @ key + (event.scale**2 / 2 * key @ covariance @ key if spread else 0)
                for key in keys
            ]
        )
        found += logits.masked_fill(~free, -torch.inf).softmax(-1) / event.group
    return found * values.norm(dim=-1) if norm else found


def reference(
    family: str,
    budget: int,
    ahead: int = 512,
    spread: bool = True,
    norm: bool = True,
    sinks: int = 4,
) -> Reference:
    def kept(events: list[Event]) -> list[list[list[int]]]:
        return [
            [
                top(scores(family, events, event, kv, ahead, spread, norm, sinks), at, budget, range(sinks))
                for kv, at in enumerate(event.positions)
            ]
            for event in events
            if event.forward == events[-1].forward
        ]

    return kept


@each_setting
@pytest.mark.parametrize("family", FAMILIES)
def test_keeps_what_the_reference_keeps(family: str, dtype: torch.dtype) -> None:
    for prompts in (PROMPTS[:1], PROMPTS):
        for sequence in watched(ExpectedAttention(interval=4), family, prompts, 14, 10, dtype):
            assert hold(sequence, reference(family, 14)) >= 6


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        (ExpectedAttention(future=3, covariance=False), {"ahead": 3, "spread": False}),
        (ExpectedAttention(value_norm=False, sinks=0), {"norm": False, "sinks": 0}),
        (ExpectedAttention(interval=3, sinks=1, future=1), {"sinks": 1, "ahead": 1}),
        (ExpectedAttention(query_aware=True), {}),
        (AdaKV(base=ExpectedAttention(), alpha=1.0, interval=3), {}),
    ],
)
def test_knobs_do_what_the_reference_does(method: EvictionMethod, arguments: dict[str, Any]) -> None:
    for sequence in watched(method, "llama", PROMPTS, 12, 7):
        times = 1 if method.interval is None else 3
        assert hold(sequence, reference("llama", 12, **arguments)) == 3 * times  # in 3 layers


def no_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    still = Bands(torch.empty(0, dtype=torch.float64))
    monkeypatch.setattr(bands_module, "bands", lambda model, layer_index: still)


def test_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries after the sink: (1, 0), (3, 0), (2, 0): mean (2, 0), variance 2/3 along the first number.

    Keys (1, 0), (0, 9), (1, 1) have logits 2 + 1/3, 0 and 2 + 1/3. Equal norms of values: rows 1 and 3 stay.
    A value of norm 11 lifts row 2 over them, since exp(7/3) = 10.3; one of 10 does not.
    """
    no_rotation(monkeypatch)
    queries = torch.tensor([[[-50.0, 7.0], [1.0, 0.0], [3.0, 0.0], [2.0, 0.0]]])
    keys = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [0.0, 9.0], [1.0, 1.0]]])
    for size, kept in ((1.0, [0, 1]), (10.0, [0, 1]), (11.0, [0, 2])):
        values = torch.tensor([[[1.0], [1.0], [size], [1.0]]])
        assert by_hand(ExpectedAttention(sinks=1), [(queries, keys, values)], 2) == [kept]
        plain = ExpectedAttention(sinks=1, value_norm=False)
        assert by_hand(plain, [(queries, keys, values)], 2) == [[0, 1]]
        assert by_hand(plain, [(queries, keys, values)], 3) == [[0, 1, 3]]


def test_spread_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries (0, 2), (0, -2), (0, 0): mean 0, variance 8/3 along the second number: only the spread tells.

    Logits of (3, 0), (0, 1), (0, 2) are 0, 4/3 and 16/3; without the spread all are 0, and the first stays.
    """
    no_rotation(monkeypatch)
    queries = torch.tensor([[[0.0, 2.0], [0.0, -2.0], [0.0, 0.0]]])
    keys, values = torch.tensor([[[3.0, 0.0], [0.0, 1.0], [0.0, 2.0]]]), torch.ones(1, 3, 1)
    step = queries, keys, values
    assert by_hand(ExpectedAttention(sinks=0), [step], 1) == [[2]]
    assert by_hand(ExpectedAttention(sinks=0), [step], 2) == [[1, 2]]
    assert by_hand(ExpectedAttention(sinks=0, covariance=False), [step], 1) == [[0]]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss"])
def test_chunks_do_not_change_what_stays(family: str) -> None:
    model, found = helpers.model(family), []
    for chunk in (1024, 7):
        set_options(model, Options(prefill_chunk=chunk))
        try:
            cache = ExpectedAttention().encode(model, helpers.context(), budget=12)
        finally:
            set_options(model, Options())
        found.append([layer.positions.tolist() for layer in cache.layers if hasattr(layer, "evictor")])
    assert found[0] == found[1]


def test_statistics_are_held_as_long_as_a_compression_is_to_come() -> None:
    model: Any = helpers.model("llama")
    once, again = ExpectedAttention(), ExpectedAttention(interval=8)
    tight: Any = once.encode(model, helpers.context(), budget=12)
    assert all(not layer.remembered for layer in tight.layers)
    going_on: Any = again.encode(model, helpers.context(), budget=12)
    for layer in going_on.layers:
        assert layer.remembered["query_count"].tolist() == [45 - 4]
        assert layer.remembered["query_scatter"].shape == (1, 6, 16, 16)
    roomy: Any = once.encode(model, helpers.context(), budget=400)  # no compression: until the next forward
    with once.attach(model), torch.no_grad():
        model(torch.tensor([[5]]), cache=roomy)
    assert all(not layer.remembered for layer in roomy.layers)


def test_future_is_refused() -> None:
    with pytest.raises(UserError, match=r"method.future=0 is no number of positions: use 1 or more"):
        ExpectedAttention(future=0)
