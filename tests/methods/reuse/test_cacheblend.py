"""CacheBlend and ProphetKV against a slow reference, and the shares of gradual selection by hand."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch

import helpers
from agentkvshift_reference import reference as divergence
from kvexp.errors import UserError
from kvexp.methods.reuse.agentkvshift import AgentKVShift
from kvexp.methods.reuse.base import RepairMethod
from kvexp.methods.reuse.cacheblend import CacheBlend
from kvexp.methods.reuse.prophetkv import ProphetKV
from kvexp.methods.reuse.reposition import Reposition
from kvexp.methods.storage.kivi import Kivi
from kvexp.prompt import Context
from reuse_reference import Reference, assert_same

IDS = helpers.tokens(40, seed=5)
CONTEXT = Context(IDS[:3], (IDS[3:14], IDS[14:20], IDS[20:29]))
QUERY = helpers.tokens(4, seed=9)


@cache
@torch.no_grad()
def placed(family: str) -> Reference:
    return Reference(family, CONTEXT, "alone")


def count(share: Fraction) -> int:
    return sum(math.ceil(share * len(chunk)) for chunk in CONTEXT.chunks)


@torch.no_grad()
def blended(method: CacheBlend, ref: Reference) -> tuple[list[Any], int]:
    """The rows that CacheBlend leaves, and the tokens that it took on."""
    rows_of = ref.copy()
    keys, values, hidden = ref.deviations(method.check)
    for layer in range(method.check):
        rows_of[layer] = ref.fresh[layer]
    rows, most = ref.tokens, 0
    for layer, share in enumerate(method.shares(ref.layers - method.check), method.check):
        if layer > method.check and method.gradual:
            _, k, v = ref.project(layer, hidden, rows)
            keys, values = torch.zeros_like(keys), torch.zeros_like(values)
            for i, new_k, new_v in zip(rows, k, v, strict=True):
                keys[i] = (new_k - ref.stale[layer][0][i]).norm(dim=-1)
                values[i] = (new_v - ref.stale[layer][1][i]).norm(dim=-1)
        if layer == method.check or method.gradual:
            score = values.square().sum(1) + (keys.square().sum(1) if method.by == "both" else 0)
            kept = ref.best(score, rows, count(share))
            hidden = hidden[[list(rows).index(i) for i in kept]]
            rows, most = kept, max(most, len(kept))
        hidden = ref.pass_on(rows_of, rows, hidden, layer)
    return rows_of, most


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "knobs", [{}, {"by": "both"}, {"gradual": True}, {"gradual": True, "by": "both", "spread": 0.9}], ids=str
)
def test_rows_are_those_of_a_slow_reference(family: str, knobs: dict[str, Any]) -> None:
    method = CacheBlend(recompute="0.3", encoded="alone", **knobs)
    cache = method.encode(helpers.model(family), CONTEXT)
    expected, most = blended(method, placed(family))
    assert_same(cache, expected)
    assert cache.report.union == most  # type: ignore[attr-defined]


def test_tokens_compete_over_the_whole_context() -> None:
    """A unit may get more than its own share: all are chosen from one list."""
    ref = placed("llama")
    _, values, _ = ref.deviations(1)
    best = ref.best(values.norm(dim=1), ref.tokens, count(Fraction("0.3")))
    shares = [len(set(best) & set(unit)) for unit in ref.units]
    assert sum(shares) == 9 and shares != [4, 2, 3]


def test_shares_of_gradual_selection() -> None:
    """They fall in a line around the share, never above 1, and their mean is the share."""
    assert CacheBlend(recompute="0.2").shares(3) == [Fraction(1, 5)] * 3
    assert CacheBlend(recompute="0.2", gradual=True).shares(3) == [
        Fraction(3, 10),
        Fraction(1, 5),
        Fraction(1, 10),
    ]
    assert CacheBlend(recompute="0.2", gradual=True).shares(1) == [Fraction(1, 5)]
    assert CacheBlend(recompute="0.8", gradual=True).shares(3) == [
        Fraction(1),
        Fraction(4, 5),
        Fraction(3, 5),
    ]
    assert CacheBlend(recompute="1", gradual=True).shares(4) == [Fraction(1)] * 4
    for layers in (2, 5, 29):
        assert sum(CacheBlend(recompute="1/3", gradual=True).shares(layers)) == Fraction(layers, 3)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_prophetkv_recomputes_what_the_question_reads(family: str) -> None:
    ref = placed(family)
    rows = ref.best(ref.relevance(QUERY), ref.tokens, count(Fraction("0.3")))
    expected, hidden = ref.copy(), ref.embed([ref.ids[i] for i in rows])
    for layer in range(ref.layers):
        hidden = ref.pass_on(expected, rows, hidden, layer)
    cache: Any = ProphetKV(recompute="0.3", encoded="alone").encode(
        helpers.model(family), CONTEXT, query=QUERY
    )
    assert_same(cache, expected)
    assert cache.report.computed == [len(rows)] * ref.layers
    assert cache.report.check_rows == 0


@pytest.mark.parametrize("method", [CacheBlend, ProphetKV])
def test_the_union_of_two_probe_sets_can_be_matched(method: type[RepairMethod]) -> None:
    model = helpers.model("llama")
    theirs: Any = AgentKVShift(recompute="0.2", encoded="alone").encode(model, CONTEXT)
    ours: Any = method(recompute="0.2", encoded="alone", match="union").encode(model, CONTEXT, query=QUERY)  # type: ignore[call-arg]
    alone: Any = method(recompute="0.2", encoded="alone").encode(model, CONTEXT, query=QUERY)
    assert ours.report.union == theirs.report.union > alone.report.union == 3 + 2 + 2


@torch.no_grad()
@pytest.mark.parametrize("check", [1, 2])
def test_prophetkv_of_a_matched_union_is_prophetkv_with_more_tokens(check: int) -> None:
    """The check layer that only counts leaves no row behind."""
    ref = placed("llama")
    _, probes = divergence(AgentKVShift(recompute="0.2", encoded="alone", check=check), ref, QUERY)
    rows = ref.best(ref.relevance(QUERY), ref.tokens, len(probes))
    expected, hidden = ref.copy(), ref.embed([ref.ids[i] for i in rows])
    for layer in range(ref.layers):
        hidden = ref.pass_on(expected, rows, hidden, layer)
    method = ProphetKV(recompute="0.2", encoded="alone", match="union", check=check)
    cache: Any = method.encode(helpers.model("llama"), CONTEXT, query=QUERY)
    assert_same(cache, expected)
    tokens = len(ref.tokens)
    assert cache.report.written == [len(rows)] * ref.layers
    assert cache.report.computed == [tokens if layer <= check else len(rows) for layer in range(ref.layers)]


def test_a_matched_union_restores_no_row_of_a_store_in_few_bits() -> None:
    model = helpers.model("llama")
    knobs: dict[str, Any] = {"encoded": "alone", "stored": Kivi(bits=2)}
    stale = Reposition(**knobs).encode(model, CONTEXT)
    ours: Any = ProphetKV(recompute="0.2", match="union", **knobs).encode(model, CONTEXT, query=QUERY)
    differ = (ours.layers[0].keys != stale.layers[0].keys).any(-1).any(1)
    assert int(differ.sum()) == ours.report.union < 26


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"check": 0}, r"check=0 measures nothing, .*: use method\.check=1 or more"),
        ({"check": -1}, "use 0 or more"),
        ({"spread": 1.5}, "from 0 to 1"),
        ({"gradual": True, "match": "union"}, "no single union"),
    ],
)
def test_knobs_out_of_range_are_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CacheBlend(**knobs)
    with pytest.raises(UserError, match="use 0 or more"):
        ProphetKV(check=-1)
    with pytest.raises(UserError, match="check=0 measures nothing"):
        ProphetKV(check=0, match="union")
    assert ProphetKV(check=0).share == Fraction("0.1")  # nothing is checked


def test_the_first_layer_shows_what_a_store_in_few_bits_lost() -> None:
    """Tokens are then chosen by the error of storing them, which is far above rounding."""
    model, stored = helpers.model("llama"), Kivi(bits=2)
    fresh: Any = CacheBlend(recompute="1").encode(model, CONTEXT)
    stale: Any = Reposition(stored=stored, encoded="alone").encode(model, CONTEXT)
    ours: Any = CacheBlend(recompute="0.3", check=0, stored=stored, encoded="alone").encode(model, CONTEXT)
    lost = (fresh.layers[0].values - stale.layers[0].values)[0].norm(dim=-1).norm(dim=0)
    best = set(lost.argsort(descending=True, stable=True)[: count(Fraction("0.3"))].tolist())
    changed = (ours.layers[0].values != stale.layers[0].values).any(-1).any(1)[0]
    assert set(changed.nonzero()[:, 0].tolist()) == best
    assert float(lost[list(best)].min()) > 1e-2
