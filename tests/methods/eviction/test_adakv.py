from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

import helpers
from evict import PROMPTS, Event, Reference, by_hand, each_setting, hold, top, watched
from kvexp import instantiate
from kvexp.errors import UserError
from kvexp.methods.eviction.adakv import AdaKV
from kvexp.methods.eviction.base import EvictionMethod
from kvexp.methods.eviction.h2o import H2O
from kvexp.methods.eviction.knorm import Knorm
from kvexp.methods.eviction.pyramidkv import PyramidKV
from kvexp.methods.eviction.snapkv import SnapKV
from kvexp.methods.eviction.triattention import TriAttention
from snap import latest, snap_scores, window_rows
from triattention_reference import statistics

BASE = SnapKV(window=4, kernel=3)


def base_scores(events: list[Event], event: Event, base: EvictionMethod) -> list[list[float]]:
    """What the base thinks of each row of each head."""
    if isinstance(base, SnapKV):
        return snap_scores(events, event, base)
    return [(-key.double().pow(2).sum(-1).sqrt()).tolist() for key in event.keys]


def equal_division(total: int, there: list[int]) -> list[int]:
    """Rows given one by one, in turn, to heads that have more."""
    given = [0] * len(there)
    while sum(given) < min(total, sum(there)):
        given[min((n, h) for h, n in enumerate(given) if n < there[h])[1]] += 1
    return given


def division(scores: list[list[float]], total: int, alpha: str, normalize: bool) -> list[int]:
    """How many of their rows the heads keep, of `scores` of the rows that may leave."""
    equal = equal_division(total, [len(head) for head in scores])
    if normalize:
        shares = [sum(sorted(head)[-n:]) / sum(head) for head, n in zip(scores, equal, strict=True)]
        scores = [[x * share for x in head] for head, share in zip(scores, shares, strict=True)]
    every = sorted((-x, h, i) for h, head in enumerate(scores) for i, x in enumerate(head))[: sum(equal)]
    best = [sum(h == head for _, h, _ in every) for head in range(len(scores))]
    safe = Fraction(alpha)
    ideal = [(1 - safe) * b + safe * c for b, c in zip(best, equal, strict=True)]
    rows = [x.numerator // x.denominator for x in ideal]
    by_remainder = sorted(range(len(rows)), key=lambda h: (rows[h] - ideal[h], h))
    for head in by_remainder[: sum(equal) - sum(rows)]:
        rows[head] += 1
    return rows


def reference(budget: int, base: EvictionMethod, alpha: str = "0.2", normalize: bool = False) -> Reference:
    def kept(events: list[Event]) -> list[list[list[int]]]:
        found = []
        for event in latest(events):
            always = window_rows(event, base) if isinstance(base, SnapKV) else range(0)
            scores = base_scores(events, event, base)
            free = [
                [x for x, position in zip(head, rows, strict=True) if position not in always]
                for head, rows in zip(scores, event.positions, strict=True)
            ]
            heads = len(scores)
            rows = division(free, heads * (budget - len(always)), alpha, normalize)
            found.append(
                [
                    top(torch.tensor(scores[h]), event.positions[h], rows[h] + len(always), always)
                    for h in range(heads)
                ]
            )
        return found

    return kept


def check(method: AdaKV, sequences: list[list[Event]], budget: int, kept: Reference, at_least: int) -> None:
    ragged = 0
    for sequence in sequences:
        assert hold(sequence, kept) >= at_least * sequence[-1].n_layers
        for event in sequence:
            if event.evicts:
                lengths = [len(rows) for rows in event.kept]
                assert sum(lengths) == len(lengths) * budget
                ragged += len(set(lengths)) > 1
    assert (ragged > 0) == (method.alpha < 1)


@each_setting
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_keeps_what_the_reference_keeps(family: str, dtype: torch.dtype) -> None:
    method = AdaKV(base=BASE, interval=3)
    for prompts in (PROMPTS[:1], PROMPTS):
        events = watched(method, family, prompts, 14, 8, dtype)
        assert len(events) == len(prompts)
        check(method, events, 14, reference(14, BASE), at_least=3)


@pytest.mark.parametrize(("alpha", "normalize"), [("0", False), ("0.5", True), ("0.2", True), ("1", False)])
def test_variants_keep_what_the_reference_keeps(alpha: str, normalize: bool) -> None:
    method = AdaKV(base=BASE, interval=1, alpha=float(alpha), normalize=normalize)
    events = watched(method, "llama", PROMPTS, 13, 5)
    check(method, events, 13, reference(13, BASE, alpha, normalize), at_least=5)


def test_over_negative_scores() -> None:
    method = AdaKV(base=Knorm(), interval=2)
    check(method, watched(method, "qwen3", PROMPTS, 12, 7), 12, reference(12, Knorm()), at_least=3)


@pytest.mark.parametrize(
    "base",
    [SnapKV(window=4, merge="attention"), Knorm(sinks=2), H2O(), PyramidKV(window=4, beta=5)],
    ids=lambda base: base.id,
)
def test_with_alpha_one_it_is_its_base(base: EvictionMethod) -> None:
    plain = watched(replace(base, interval=1), "llama", PROMPTS, 14, 5)
    wrapped = watched(AdaKV(base=base, alpha=1.0, interval=1), "llama", PROMPTS, 14, 5)
    assert [[e.kept for e in sequence] for sequence in plain] == [
        [e.kept for e in sequence] for sequence in wrapped
    ]


def test_over_pyramidkv_heads_share_their_layers_budget() -> None:
    base = PyramidKV(window=4, kernel=3, beta=5)
    (events,) = watched(AdaKV(base=base), "llama", PROMPTS[:1], 14, 0)
    held = [[len(rows) for rows in event.kept] for event in events if event.reading]
    assert [sum(lengths) for lengths in held] == [2 * 22, 2 * 14, 2 * 6]  # 10 +- 8 beside the window
    assert any(len(set(lengths)) > 1 for lengths in held)


def test_over_a_base_whose_layers_have_budgets_of_their_memory(tmp_path: Path) -> None:
    """Heads trade rows, and a layer holds what the base alone would give it."""
    base = TriAttention(mode="per_layer_perhead", budgets="concentration", protect_prompt=False)
    model, memory = helpers.model("llama"), statistics("llama", tmp_path)
    alone: Any = base.encode(model, helpers.context(), memory, 20)
    shared: Any = AdaKV(base=base, alpha=0).encode(model, helpers.context(), memory, 20)
    assert shared.entries() == alone.entries() and len(set(alone.entries())) > 1
    with pytest.raises(UserError, match="needs query statistics"):
        AdaKV(base=base).encode(model, helpers.context(), None, 20)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_one_latent_head_keeps_what_the_base_keeps(family: str) -> None:
    kept = [
        [e.kept for sequence in watched(method, family, PROMPTS, 14, 5) for e in sequence]
        for method in (SnapKV(window=4, interval=2), AdaKV(base=SnapKV(window=4), interval=2))
    ]
    assert kept[0] == kept[1]


def two_heads() -> Any:
    """Of hundred, head 0 gives 60 20 10 6 | 4, head 1 gives 30 28 22 18 | 2; the last row is the window."""
    keys = torch.tensor([[60.0, 20.0, 10.0, 6.0, 4.0], [30.0, 28.0, 22.0, 18.0, 2.0]]).log()[:, :, None]
    return torch.ones_like(keys), keys, keys


def test_by_hand() -> None:
    """3 rows a head, one of which is the window's, leave 4: the best are 60 and 30 28 22, 1 and 3 a head.

    alpha = 0.2: 0.8 + 0.4 = 1.2 and 2.4 + 0.4 = 2.8, rounded 1 and 3. alpha = 0.8: 1.8 and 2.2, 2 and 2.
    alpha = 0.5: 1.5 and 2.5; of equal remainders the lower head's is rounded up.
    """
    base, step = SnapKV(window=1, kernel=1), two_heads()
    uneven, even = [[0, 4], [0, 1, 2, 4]], [[0, 1, 4], [0, 1, 4]]
    assert by_hand(AdaKV(base=base), [step], 3) == uneven
    assert by_hand(AdaKV(base=base, alpha=0.0), [step], 3) == uneven
    for alpha in (0.5, 0.8, 1.0):
        assert by_hand(AdaKV(base=base, alpha=alpha), [step], 3) == even


def test_by_hand_normalized() -> None:
    """The best two hold 80 of 96 and 58 of 98: scores are 50 16.67 .. and 17.76 16.57 .., 2 and 2 a head."""
    method = AdaKV(base=SnapKV(window=1, kernel=1), alpha=0.0, normalize=True)
    assert by_hand(method, [two_heads()], 3) == [[0, 1, 4], [0, 1, 4]]


def test_by_hand_heads_trade_rows_while_decoding() -> None:
    """Heads hold rows 0 | 4 and 0 1 2 | 4; a token is seen at weight 1 by both and becomes the window.

    In question are 60 4 of 65 and 30 28 22 2 of 83: the best 4 are 60 and 30 28 22, and row 4 leaves both.
    """
    method = AdaKV(base=SnapKV(window=1, kernel=1), alpha=0.0, interval=1)
    zero = torch.zeros(2, 1, 1)
    one = torch.ones(2, 1, 1)
    assert by_hand(method, [two_heads(), (one, zero, zero)], 3) == [[0, 5], [0, 1, 2, 5]]


def test_equal_scores_go_to_the_lower_head() -> None:
    """All keys are equal: of 4 rows head 0 takes all that it has (3 beside the window), head 1 one."""
    same = torch.zeros(2, 4, 1)
    method = AdaKV(base=SnapKV(window=1, kernel=1), alpha=0.0)
    assert by_hand(method, [(same, same, same)], 3) == [[0, 1, 2, 3], [0, 3]]


def test_what_is_protected_here_is_protected_in_the_base() -> None:
    method = AdaKV(base=SnapKV(window=1, kernel=1), alpha=0.0, sinks=3)
    assert by_hand(method, [two_heads()], 4) == [[0, 1, 2, 4], [0, 1, 2, 4]]
    assert method.smallest_budget() == 5
    assert AdaKV(recent=6, base=SnapKV(window=4, sinks=2)).smallest_budget() == 9
    assert AdaKV(group="max").scorer.group == AdaKV(base=SnapKV(group="max")).scorer.group == "max"


def built(base: Any) -> AdaKV:
    node = {"_target_": "kvexp.methods.eviction.adakv.AdaKV", "base": base}
    return instantiate.build("method", "adakv", node)


def test_a_base_is_a_name_with_knobs() -> None:
    assert built("snapkv") == AdaKV()
    assert built({"name": "snapkv", "window": 8}) == AdaKV(base=SnapKV(window=8))
    assert built("knorm").base == Knorm()
    assert built("h2o").observes and not built("snapkv").observes


@pytest.mark.parametrize(
    ("base", "says"),
    [
        ("snapvk", "did you mean 'snapkv'"),
        ({"name": "snapkv", "windw": 8}, "windw"),
        ("full", "method.base=.* is not possible"),
        ("tova", "method.base=tova lets all heads of a layer hold the same tokens: take another base"),
        ("adakv", "method.base=adakv divides rows or reads the context in a way of its own"),
        ({"name": "snapkv", "interval": 128}, "interval=128 of method.base has no effect: write method.int"),
        ({"name": "snapkv", "query_aware": True}, "write method.query_aware=true"),
    ],
)
def test_bases_that_cannot_work(base: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        built(base)


def test_knobs_that_make_no_sense() -> None:
    with pytest.raises(UserError, match=r"alpha=1\.5 is no share: use a number from 0 to 1"):
        AdaKV(alpha=1.5)
    with pytest.raises(UserError, match=r"alpha=-0\.1 is no share"):
        AdaKV(alpha=-0.1)
    method = AdaKV(base=Knorm(), normalize=True)
    with pytest.raises(UserError, match=r"method\.base=knorm can be negative: leave it out"):
        method.encode(helpers.model("llama"), helpers.context(), budget=9)
