from __future__ import annotations

from math import log

import pytest
import torch

import helpers
from evict import PROMPTS, Event, Reference, by_hand, each_setting, hold, top, watched
from kvexp.attention.options import Options, set_options
from kvexp.errors import UserError
from kvexp.methods.eviction.rkv import RKV


def similarities(keys: torch.Tensor, threshold: float) -> torch.Tensor:
    """Mean similarity of each key to the others, the last near duplicate of each row spared."""
    unit = torch.nn.functional.normalize(keys.float(), dim=-1)
    similar = unit @ unit.T
    for i, row in enumerate(similar):
        row[i] = 0.0
        above = [j for j in range(len(keys)) if row[j] > threshold]
        if above:
            row[above[-1]] = 0.0
    return similar.mean(0)


def attention(
    events: list[Event], event: Event, kv: int, window: int, kernel: int, most: bool
) -> torch.Tensor:
    """Pooled attention of the last `window` queries to the rows before, the largest logit of the group."""
    mine = [one for one in events if one.place == event.place]
    queries = torch.cat([one.queries for one in mine], dim=1)[:, -window:].float()
    positions = event.positions[kv]
    past = [i for i, p in enumerate(positions) if p < event.upcoming - window]
    scores = []
    for query in range(queries.shape[1]):
        logits = torch.stack(
            [
                torch.stack([queries[head, query] @ event.keys[kv][i].float() * event.scale for i in past])
                for head in range(kv * event.group, (kv + 1) * event.group)
            ]
        )
        scores.append((logits.amax(0) if most else logits.mean(0)).softmax(-1))
    mean, half = torch.stack(scores).mean(0), kernel // 2
    pooled = torch.zeros(len(positions))
    for n, i in enumerate(past):
        pooled[i] = mean[max(0, n - half) : n + half + 1].max()
    return pooled


def reference(
    budget: int, window: int = 8, kernel: int = 7, balance: float = 0.1, most: bool = True
) -> Reference:
    def kept(events: list[Event]) -> list[list[list[int]]]:
        found = []
        for event in (event for event in events if event.forward == events[-1].forward):
            heads = []
            for kv, positions in enumerate(event.positions):
                redundant = similarities(event.keys[kv], 0.5).softmax(-1)
                important = attention(events, event, kv, window, kernel, most)
                scores = balance * important - (1 - balance) * redundant
                heads.append(top(scores, positions, budget, range(event.upcoming - window, event.upcoming)))
            found.append(heads)
        return found

    return kept


@each_setting
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_keeps_what_the_reference_keeps(family: str, dtype: torch.dtype) -> None:
    for prompts in (PROMPTS[:1], PROMPTS):
        for sequence in watched(RKV(interval=4), family, prompts, 14, 10, dtype):
            assert hold(sequence, reference(14)) >= 4  # 2 layers, prompt end and twice while decoding


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        (RKV(interval=3, window=3, kernel=3, balance=0.7), {"window": 3, "kernel": 3, "balance": 0.7}),
        (RKV(interval=3, window=2, balance=1.0, group="mean"), {"window": 2, "balance": 1.0, "most": False}),
        (RKV(interval=3, window=1, balance=0.0, trigger="slack"), {"window": 1, "balance": 0.0}),
    ],
)
def test_knobs_do_what_the_reference_does(method: RKV, arguments: dict[str, float]) -> None:
    for sequence in watched(method, "llama", PROMPTS, 12, 7):
        assert hold(sequence, reference(12, **arguments)) >= 6  # type: ignore[arg-type]


def test_redundancy_by_hand() -> None:
    """Three equal keys, then one at a right angle in the window: redundancies 2/4, 1/4, 0 and 0.

    Redundancy alone lets the first two go, one after the other.
    """
    keys = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    step = keys, keys, keys
    method = RKV(window=1, kernel=1, balance=0.0)
    assert by_hand(method, [step], 3) == [[1, 2, 3]]
    assert by_hand(method, [step], 2) == [[2, 3]]


def test_balance_by_hand() -> None:
    """Keys 2, 1, 1 in one direction, and a query with logits 2 ln 4, ln 4, ln 4 on them.

    Attention 16/24, 4/24, 4/24; R = softmax(1/2, 1/4, 0, 0) = 0.3342, 0.2603, 0.2027, 0.2027. The first row
    beats the third when balance (16 - 4)/24 > (1 - balance)(0.3342 - 0.2027): from a balance of 0.2082 on.
    """
    keys = torch.tensor([[[2.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    query = torch.tensor([[[log(4), 0.0]]]).expand(1, 4, 2)
    for balance, stays in ((0.1, 2), (0.2, 2), (0.22, 0), (0.5, 0)):
        method = RKV(window=1, kernel=1, balance=balance)
        assert by_hand(method, [(query, keys, keys)], 2) == [[stays, 3]]


def test_near_duplicates_that_came_last_are_spared() -> None:
    """The threshold decides who is a duplicate: without one nobody is spared, and equal rows tie."""
    keys = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    method = RKV(window=1, kernel=1, balance=0.0, threshold=2.0)
    assert by_hand(method, [(keys, keys, keys)], 2) == [[0, 3]]  # 2/4 each: ties to the lower index


def test_chunks_do_not_change_what_stays() -> None:
    model, found = helpers.model("qwen3"), []
    for chunk in (1024, 7):
        set_options(model, Options(prefill_chunk=chunk))
        try:
            cache = RKV().encode(model, helpers.context(), budget=12)
        finally:
            set_options(model, Options())
        found.append([layer.positions.tolist() for layer in cache.layers])
    assert found[0] == found[1]


def test_the_prompt_is_protected_only_if_asked() -> None:
    [plain] = watched(RKV(interval=4), "llama", PROMPTS[1:2], 31, 12)
    [guarded] = watched(RKV(interval=4, window=1, protect_prompt=True), "llama", PROMPTS[1:2], 31, 12)
    prompt = set(range(29))
    assert any(event.evicts and not prompt <= set(kept) for event in plain for kept in event.kept)
    assert all(prompt <= set(kept) for event in guarded for kept in event.kept if event.upcoming > 29)
    assert any(event.evicts for event in guarded)


def test_knobs_are_refused() -> None:
    for balance in (-0.1, 1.1):
        with pytest.raises(UserError, match=rf"method.balance={balance} is not possible: use 0 .* to 1"):
            RKV(balance=balance)
    with pytest.raises(UserError, match=r"budget=8 leaves rkv nothing to choose .* use budget=9 or more"):
        RKV().encode(helpers.model("llama"), helpers.context(), budget=8)
