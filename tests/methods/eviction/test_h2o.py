from __future__ import annotations

from typing import Any

import pytest
import torch

import helpers
from evict import PROMPTS, Event, Reference, by_hand, each_setting, hold, top, watched
from kvexp.attention.options import Options, set_options
from kvexp.budget import Budget
from kvexp.errors import UserError
from kvexp.methods.eviction.h2o import H2O
from received import Received


def reference(budget: int, recent: int, age: bool = False, sinks: int = 0) -> Reference:
    received = Received()

    def kept(events: list[Event]) -> list[list[list[int]]]:
        received.follow(events)
        found = []
        for event in (event for event in events if event.forward == events[-1].forward):
            always = [*range(sinks), *range(event.upcoming - recent, event.upcoming)]
            heads = []
            for kv, positions in enumerate(event.positions):
                scores = torch.tensor([received.mass[event.place, kv][p] for p in positions])
                if age:
                    scores = scores / torch.tensor([float(event.upcoming - p) for p in positions])
                heads.append(top(scores, positions, budget, always))
            found.append(heads)
        return found

    return kept


@each_setting
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_keeps_what_the_reference_keeps(family: str, dtype: torch.dtype) -> None:
    for prompts in (PROMPTS[:1], PROMPTS):
        events = watched(H2O(), family, prompts, 13, 8, dtype)
        assert len(events) == len(prompts)
        for sequence in events:
            assert hold(sequence, reference(13, recent=6)) >= 14  # 2 layers, prompt end and every step


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        (H2O(normalise="age"), {"recent": 6, "age": True}),
        (H2O(recent_percent=None, recent=2, sinks=3, interval=3), {"recent": 2, "sinks": 3}),
        (H2O(recent_percent=0, prefill="off"), {"recent": 0}),
    ],
    ids=["age", "sinks", "no recent"],
)
def test_variants(method: H2O, arguments: dict[str, Any]) -> None:
    for sequence in watched(method, "qwen3", PROMPTS, 13, 8):
        assert hold(sequence, reference(13, **arguments)) >= 4


def test_a_prompt_that_is_compressed_while_it_is_read() -> None:
    """Chunks of 7 tokens: what a row received in earlier chunks counts, and what left is not seen again."""
    model = helpers.model("llama", torch.float32)  # the very one that `watched` takes
    set_options(model, Options(prefill_chunk=7))
    try:
        runs = watched(H2O(prefill="chunks"), "llama", PROMPTS, 13, 3)
    finally:
        set_options(model, Options())
    for sequence in runs:
        assert sum(event.reading and event.evicts for event in sequence) >= 2 * 3
        assert hold(sequence, reference(13, recent=6)) >= 2 * 5


def windowed(budget: int, window: int, recent: int, age: bool) -> Reference:
    """Keep by the attention of the latest queries over the rows that are held now."""

    def kept(events: list[Event]) -> list[list[list[int]]]:
        found = []
        for event in (event for event in events if event.forward == events[-1].forward):
            mine = [e for e in events if e.place == event.place]
            latest = torch.cat([e.queries for e in mine], dim=1)[:, -window:].float()
            at = [position for e in mine for position in e.query_positions][-window:]
            heads = []
            for kv, positions in enumerate(event.positions):
                scores = torch.zeros(len(positions))
                for head in range(kv * event.group, (kv + 1) * event.group):
                    for query, position in zip(latest[head], at, strict=True):
                        logits = event.keys[kv].float() @ query * event.scale
                        logits[torch.tensor(positions) > position] = -torch.inf
                        scores += logits.softmax(0)
                if age:
                    scores /= torch.tensor([max(1, sum(t >= p for t in at)) for p in positions])
                heads.append(top(scores, positions, budget, range(event.upcoming - recent, event.upcoming)))
            found.append(heads)
        return found

    return kept


@pytest.mark.parametrize("normalise", ["none", "age"])
def test_a_window_of_queries(normalise: str) -> None:
    method = H2O(window=9, recent_percent=None, recent=3, normalise=normalise)  # type: ignore[arg-type]
    for sequence in watched(method, "llama", PROMPTS, 12, 5):
        assert hold(sequence, windowed(12, 9, 3, normalise == "age")) >= 8


def step(key: float, query: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token of one head in one dimension."""
    one = torch.tensor([[[key]]])
    return torch.tensor([[[query]]]), one, one


def test_by_hand() -> None:
    """Keys ln 3, 0, ln 2, 0 and queries 1: query t spreads 3 : 1 : 2 : 1 over the first t rows.

    Row 0 receives 1 + 3/4 + 3/6 + 3/7, row 1 1/4 + 1/6 + 1/7 = 0.56, row 2 2/6 + 2/7 = 0.62, row 3 1/7. One
    row of three is recent: of the others rows 0 and 2 are best. A decoded 0 sees 3 : 2 : 1 : 1 (rows 0, 2, 3,
    4), so row 3 has 1/7 + 1/7 = 0.29 against 0.62 + 2/7 of row 2 and leaves; nothing that row 1 had counts.
    """
    keys = torch.tensor([[[3.0], [1.0], [2.0], [1.0]]]).log()
    prompt = torch.ones(1, 4, 1), keys, keys
    assert by_hand(H2O(recent_percent=34), [prompt], 3) == [[0, 2, 3]]
    assert by_hand(H2O(recent_percent=34), [prompt, step(0.0)], 3) == [[0, 2, 4]]


def test_age_by_hand() -> None:
    """Equal keys: row j of four receives 1/(j+1) + ... + 1/4, so 2.08, 1.08, 0.58 and 0.25.

    Divided by 4, 3, 2 and 1 queries: 0.52, 0.36, 0.29 and 0.25, still the first rows. A decoded key of ln 8
    with query 1 takes 8/12 of it all and leaves 1/12 to each other: 2.17/5, 1.17/4, 0.67/3, 0.33/2 and 0.67.
    """
    zeros = torch.zeros(1, 4, 1)
    prompt = torch.ones(1, 4, 1), zeros, zeros
    late = step(float(torch.tensor(8.0).log()))
    plain, aged = (H2O(recent_percent=0, normalise=how, prefill="off") for how in ("none", "age"))
    assert by_hand(plain, [prompt, late], 2) == [[0, 1]]
    assert by_hand(aged, [prompt, late], 2) == [[0, 4]]


@pytest.mark.parametrize(("second", "kept"), [(-2.0, [0, 2]), (-0.5, [0, 1])])
def test_the_group_adds_up(second: float, kept: list[int]) -> None:
    """Two query heads on keys 0, ln 3, -ln 3; the second token's queries, -8, leave row 1 less than 0.001.

    The last query of the first head, 1, gives rows 0 to 2 shares 1 : 3 : 1/3, so 0.23, 0.69 and 0.08. That of
    the second head gives 0.10, 0.01 and 0.89 when it is -2, and 0.30, 0.17 and 0.52 when it is -1/2. Sums of
    rows 1 and 2 are 0.70 and 0.97, or 0.87 and 0.60; each head alone would always choose the same row.
    """
    keys = torch.tensor([[[1.0], [3.0], [1 / 3]]]).log()
    queries = torch.tensor([[[0.0], [-8.0], [1.0]], [[0.0], [-8.0], [second]]])
    assert by_hand(H2O(recent_percent=0), [(queries, keys, keys)], 2) == [kept]


def test_knobs() -> None:
    with pytest.raises(UserError, match=r"recent_percent=100 leaves no row"):
        H2O(recent_percent=100)
    with pytest.raises(UserError, match=r"set h2o's recent_percent to null"):
        H2O(recent=4)
    with pytest.raises(UserError, match=r"window=0 is no number of queries"):
        H2O(window=0)
    with pytest.raises(UserError, match=r"h2o adds attention up"):
        H2O(group="max")


@pytest.mark.parametrize("percent", [None, 0, 34, 50, 99])
@pytest.mark.parametrize("sinks", [0, 1, 7])
def test_smallest_budget_leaves_one_row(percent: int | None, sinks: int) -> None:
    method = H2O(recent_percent=percent, sinks=sinks)
    least = method.smallest_budget()
    assert least - sinks - method.recent_rows(least) >= 1
    assert least == 1 or least - 1 - sinks - method.recent_rows(least - 1) < 1
    method.check_budget(Budget(least))
    if least > 1:
        with pytest.raises(UserError, match=f"budget={least} or more"):
            method.check_budget(Budget(least - 1))
