"""What an evaluation leaves for the record, and the guard against a method that did nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvexp.budget import Budget
from kvexp.measure.answered import Answered, NothingHappened, check_counters
from kvexp.measure.timing import Stopwatch

METHOD: Any = SimpleNamespace(id="asm", expects=("looked_up",), uses_budget=True)
REUSE: Any = SimpleNamespace(id="cacheblend", expects=("reused", "recomputed"), uses_budget=False)


def test_sections_of_a_record() -> None:
    watch = Stopwatch()
    for name, seconds in (("total", 9.0), ("encode", 2.0), ("query", 1.0), ("query", 3.0), ("decode", 4.0)):
        watch.add(name, seconds)
    answered = Answered({"accuracy": {"value": 0.5}}, {"evicted": 3}, None, 100, "ab12")
    assert answered.sections(watch) == {
        "metrics": {"accuracy": {"value": 0.5}},
        "cache": {"evicted": 3},
        "fidelity": None,
        "timing": {
            "prepare_s": None,  # nothing was prepared
            "encode_s": 2.0,
            "first_token_s": 2.0,
            "decode_tokens_per_s": 25.0,
            "total_s": 9.0,
        },
    }


def test_a_rate_needs_tokens() -> None:
    watch = Stopwatch()
    watch.add("decode", 4.0)
    assert Answered({}, {}, None, 0, None).sections(watch)["timing"]["decode_tokens_per_s"] is None


@pytest.mark.parametrize("cache", [{"looked_up": 0}, {}, {"evicted": 7}])
def test_a_declared_counter_at_zero_is_an_error(cache: dict[str, int]) -> None:
    with pytest.raises(NothingHappened, match=r"asm declares .* 'looked_up' .*\(65 tokens\) .*\(64\)"):
        check_counters(METHOD, Budget(64), {"context_tokens": 65, **cache})


@pytest.mark.parametrize("cache", [{"reused": 9}, {"recomputed": 9}, {"reused": 9, "recomputed": 0}])
def test_a_method_without_a_budget_has_to_count_whatever_the_context(cache: dict[str, int]) -> None:
    with pytest.raises(NothingHappened, match="cacheblend declares") as caught:
        check_counters(REUSE, Budget(None), {"context_tokens": 65, **cache})
    assert "budget" not in str(caught.value) and "bypassed" not in str(caught.value)


@pytest.mark.parametrize(
    ("cache", "told"),
    [
        (
            {"reused": 0, "recomputed": 9, "reusable": 9},
            "every token of units this short was recomputed, lower",
        ),
        ({"reused": 9, "recomputed": 0, "reusable": 9}, "no token of the units was recomputed, raise"),
        ({"reused": 0, "recomputed": 0, "reusable": 0}, "no context holds a unit of text, take a task whose"),
    ],
)
def test_a_method_of_reuse_is_told_what_to_change(cache: dict[str, int], told: str) -> None:
    with pytest.raises(NothingHappened, match=told):
        check_counters(REUSE, Budget(None), {"context_tokens": 65, **cache})


def test_any_other_method_without_a_budget_was_bypassed() -> None:
    method: Any = SimpleNamespace(id="kivi", expects=("quantised",), uses_budget=False)
    with pytest.raises(NothingHappened, match=r"counts 'quantised', .*: the method was bypassed .* 65"):
        check_counters(method, Budget(None), {"context_tokens": 65, "quantised": 0})


@pytest.mark.parametrize(
    ("method", "budget", "cache"),
    [
        (METHOD, 64, {"context_tokens": 65, "looked_up": 1}),
        (METHOD, 64, {"context_tokens": 64, "looked_up": 0}),  # everything fits
        (METHOD, None, {"context_tokens": 4096, "looked_up": 0}),  # the budget is the whole context
        (SimpleNamespace(id="full", expects=(), uses_budget=False), None, {"context_tokens": 4096}),
        (REUSE, None, {"context_tokens": 65, "reused": 1, "recomputed": 1}),
    ],
)
def test_what_may_stay_at_zero(method: Any, budget: int | None, cache: dict[str, int]) -> None:
    check_counters(method, Budget(budget), cache)
