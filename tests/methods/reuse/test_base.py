"""Shares, and the guard against a method that reused or recomputed nothing."""

from __future__ import annotations

from dataclasses import fields
from fractions import Fraction
from typing import Any

import pytest

import helpers
from kvexp.budget import Budget
from kvexp.errors import UserError
from kvexp.measure.answered import NothingHappened, check_counters
from kvexp.methods.eviction.snapkv import SnapKV
from kvexp.methods.reuse.agentkvshift import AgentKVShift
from kvexp.methods.reuse.agentkvshift_plus import AgentKVShiftPlus
from kvexp.methods.reuse.base import parsed, shown
from kvexp.methods.reuse.cacheblend import CacheBlend
from kvexp.methods.reuse.prophetkv import ProphetKV
from kvexp.methods.reuse.reposition import Reposition
from kvexp.methods.storage.kivi import Kivi
from kvexp.prompt import Context


@pytest.mark.parametrize(
    ("written", "share", "text"),
    [
        ("0.1", Fraction(1, 10), "0.1"),
        (0.1, Fraction(1, 10), "0.1"),  # as a command line gives it
        (0.3, Fraction(3, 10), "0.3"),
        ("10%", Fraction(1, 10), "0.1"),
        ("12.5 %", Fraction(1, 8), "0.125"),
        ("1/3", Fraction(1, 3), "1/3"),
        (1, Fraction(1), "1"),
        ("1.0", Fraction(1), "1"),
    ],
)
def test_a_share_is_an_exact_fraction(written: Any, share: Fraction, text: str) -> None:
    assert parsed(written) == share and shown(share) == text
    method = CacheBlend(recompute=written)
    assert (method.share, method.recompute) == (share, text)
    assert method == CacheBlend(recompute=text)  # one cell, however it is written


@pytest.mark.parametrize("written", ["1e-400", "1e-7", "1e-999999999", "1e-5%", "1e999999999", "1.01", 0.0])
def test_a_share_that_is_no_token_of_any_text_is_refused(written: Any) -> None:
    with pytest.raises(UserError, match="is not possible: write a share above 0"):
        parsed(written)
    assert parsed("1e-6") == parsed("1e-4%") == Fraction(1, 10**6)


def test_shares_of_a_unit_are_rounded_up_without_floats() -> None:
    assert [CacheBlend(recompute="0.1").count(n) for n in (1, 10, 11, 20, 21, 110)] == [1, 1, 2, 2, 3, 11]
    assert CacheBlend(recompute="0.3").count(10) == 3  # 0.3 * 10 in floats is above 3
    assert CacheBlend(recompute="0.7").count(10) == 7  # and 0.7 * 10, at times, below 7
    assert CacheBlend(recompute="1/3").count(9) == 3


@pytest.mark.parametrize("method", [AgentKVShift(), AgentKVShiftPlus(), CacheBlend(), ProphetKV()])
def test_a_run_that_reuses_or_recomputes_nothing_fails(method: Any) -> None:
    context, model = helpers.context(), helpers.model("llama")
    cache = method.encode(model, context, query=(1, 2))
    counted = {"context_tokens": len(context), **cache.counters}
    check_counters(method, Budget(None), counted)
    for name in ("reused", "recomputed"):
        with pytest.raises(NothingHappened, match=f"'{name}'"):
            check_counters(method, Budget(None), {**counted, name: 0})
    empty = method.encode(model, Context(context.ids, ()), query=(1, 2))  # no unit in it
    with pytest.raises(NothingHappened):
        check_counters(method, Budget(None), {"context_tokens": len(context), **empty.counters})


def test_a_share_of_one_reuses_nothing_and_reposition_recomputes_nothing() -> None:
    context, model = helpers.context(), helpers.model("llama")
    for method in (AgentKVShift(recompute="1"), Reposition()):
        cache = method.encode(model, context)
        check_counters(method, Budget(None), {"context_tokens": len(context), **cache.counters})
        assert 0 in (cache.counters["reused"], cache.counters["recomputed"])


def test_a_store_holds_rows_exactly_or_as_a_method_of_storage_does() -> None:
    with pytest.raises(UserError, match="stores no rows: use full"):
        Reposition(stored=SnapKV())
    assert Reposition().codec(helpers.model("llama")) is None
    with pytest.raises(UserError, match="a store holds every row of a unit"):
        Reposition(stored=Kivi(of=SnapKV()))


def test_plus_has_the_knobs_of_agentkvshift() -> None:
    assert {one.name for one in fields(AgentKVShiftPlus)} == {one.name for one in fields(AgentKVShift)}
    same = {one.name: getattr(AgentKVShiftPlus(), one.name) for one in fields(AgentKVShift)}
    changed = {name for name, value in same.items() if value != getattr(AgentKVShift(), name)}
    assert changed == {"probes", "sets", "union_fresh", "weights", "shrink", "first", "drift"}
