"""AgentKVShift against a slow reference, and its identities."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import helpers
from agentkvshift_reference import reference
from kvexp.errors import UserError
from kvexp.methods.reuse.agentkvshift import AgentKVShift
from kvexp.methods.reuse.agentkvshift_plus import AgentKVShiftPlus
from kvexp.methods.storage.kivi import Kivi
from kvexp.prompt import Context
from reuse_reference import Reference, assert_same

IDS = helpers.tokens(40, seed=5)
CONTEXT = Context(IDS[:3], (IDS[3:14], IDS[14:20], IDS[20:29]))
QUERY = helpers.tokens(4, seed=9)


@cache
@torch.no_grad()
def placed(family: str, encoded: str = "behind_header") -> Reference:
    return Reference(family, CONTEXT, encoded)


VARIANTS: dict[str, dict[str, Any]] = {
    "as in the paper": {},
    "average after rotation": {"average": "post"},
    "union fresh": {"union_fresh": True},
    "weights per head": {"weights_by": "per_head", "clip": 2.5},
    "unweighted": {"weights": "none"},
    "keys alone": {"shift": "keys"},
    "values alone": {"shift": "values"},
    "no shift": {"shift": "none"},
    "shared probes": {"sets": "shared"},
    "question probes": {"probes": "query"},
    "question probes, unweighted": {"probes": "query", "weights": "none"},
    "oracle": {"mean": "oracle", "weights": "none"},
    "shrunk": {"shrink": "james_stein", "weights": "none"},
    "first tokens": {"first": 2},
    "fresh check layer": {"at_check": "fresh"},
    "drift": {"drift": 5.0},
    "check layer 0": {"check": 0, "probes": "query", "weights": "none"},
    "check layer 2": {"check": 2},
}


def encoded(method: AgentKVShift, family: str = "llama", context: Any = CONTEXT, memory: Any = None) -> Any:
    return method.encode(helpers.model(family), context, memory, query=QUERY)


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_are_those_of_a_slow_reference(variant: str) -> None:
    method = AgentKVShift(recompute="0.25", encoded="alone", **VARIANTS[variant])
    expected, union = reference(method, placed("llama", "alone"), QUERY)
    cache = encoded(method)
    assert_same(cache, expected)
    assert cache.report.union == len(union)


@pytest.mark.parametrize("knobs", [{}, {"drift": None}, {"first": 0, "drift": 40.0}], ids=str)
def test_plus_is_its_description(knobs: dict[str, Any]) -> None:
    method = AgentKVShiftPlus(recompute="0.3", encoded="alone", **knobs)
    expected, union = reference(method, placed("llama", "alone"), QUERY)
    cache = encoded(method)
    assert_same(cache, expected)
    assert cache.report.union == len(union)
    assert cache.report.check_rows == 0  # no token but the probes ran to the check layer


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_units_encoded_behind_the_header(family: str) -> None:
    """The first unit stands where it was encoded: it is off by rounding alone, whatever is chosen in it."""
    method = AgentKVShift(recompute="0.25")
    expected, _ = reference(method, placed(family), QUERY)
    assert_same(encoded(method, family), expected)


def test_random_probes_depend_on_seed_and_text_alone() -> None:
    method = AgentKVShift(probes="random", weights="none", recompute="0.3", shift="none", sets="shared")
    one, other = Context(IDS[:3], (IDS[3:14], IDS[14:20])), Context(IDS[:3], (IDS[14:20], IDS[3:14]))

    def fresh(context: Context, seed: int = 0) -> list[list[int]]:
        from kvexp.methods.reuse.geometry import Geometry
        from kvexp.methods.reuse.probes import drawn, top_of_units

        geometry = Geometry.of([context], [], torch.device("cpu"))
        chosen = top_of_units(
            geometry, drawn(geometry, f"{seed} both"), [method.count(u.length) for u in geometry.units]
        )
        return [chosen[0, unit.columns].nonzero()[:, 0].tolist() for unit in geometry.units]

    first, second = fresh(one)
    assert fresh(other) == [second, first]
    assert [len(x) for x in (first, second)] == [4, 2]
    assert fresh(one, seed=1) != [first, second]
    assert encoded(method, context=one).report.union == 6


def test_with_a_share_of_one_everything_is_fresh() -> None:
    expected = placed("llama").fresh
    for method in (
        AgentKVShift(recompute="1"),
        AgentKVShiftPlus(recompute=1),
        AgentKVShift(recompute="100%", sets="shared"),
    ):
        cache = encoded(method)
        assert_same(cache, expected)
        assert cache.counters["reused"] == 0 and method.expects == ("recomputed",)


def test_counters_add_up() -> None:
    cache = encoded(AgentKVShift(recompute="0.25"))
    report, layers, tokens = cache.report, 3, 26
    union = report.union
    assert report.computed == [tokens, tokens, union]
    assert report.written == [tokens, union, union]
    assert cache.counters == {
        "reused": 2 * (tokens - union),
        "recomputed": 2 * tokens + union,
        "reusable": layers * tokens,
        "unit_tokens": tokens,
        "union": union,
        "check_rows": 2 * (tokens - union),
        "question_rows": 0,
        "moved_bytes": report.moved_bytes,
        "store_hits": 0,
        "store_misses": 3,  # the units; headers are not counted
        "found": 0,
    }
    assert report.share == pytest.approx((2 * tokens + union) / (layers * tokens))
    assert report.union_share == pytest.approx(union / tokens)
    assert report.moved_bytes == 29 * layers * 2 * 2 * 16 * 4
    assert report.seconds > 0 and report.store_seconds > 0
    assert encoded(AgentKVShiftPlus(recompute="0.25")).report.question_rows == len(QUERY) * layers


def test_union_matches_the_two_divergence_sets() -> None:
    twice = encoded(AgentKVShift(recompute="0.25")).report.union
    for probes in ("random", "query", "divergence"):
        method = AgentKVShift(recompute="0.25", probes=probes, sets="shared", match="union")  # type: ignore[arg-type]
        assert encoded(method).report.union == twice


@pytest.mark.parametrize("check", [1, 2])
def test_a_matched_union_changes_the_number_of_probes_alone(
    check: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check layer that only counts leaves no row behind."""
    knobs: dict[str, Any] = {"recompute": "0.25", "encoded": "alone", "check": check}
    ref = placed("llama", "alone")
    with torch.no_grad():
        _, union = reference(AgentKVShift(**knobs), ref, QUERY)
    counts = {len(unit): len(set(unit) & set(union)) for unit in ref.units}
    query: dict[str, Any] = {**knobs, "probes": "query", "sets": "shared", "weights": "none", "drift": 5.0}
    ours = encoded(AgentKVShift(**query, match="union"))
    monkeypatch.setattr(AgentKVShift, "count", lambda self, tokens: counts[tokens])
    plain = encoded(AgentKVShift(**query))
    assert ours.report.union == plain.report.union == sum(counts.values()) > 3 + 2 + 3
    for mine, theirs in zip(ours.layers, plain.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
    assert ours.report.written == plain.report.written
    assert ours.report.computed == [26] * (check + 1) + plain.report.computed[check + 1 :]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"recompute": "0"}, "write a share above 0"),
        ({"recompute": "1.5"}, "write a share above 0"),
        ({"recompute": "some"}, "is no share"),
        ({"recompute": "1/0"}, "is no share"),
        ({"recompute": "1e-400"}, "write a share above 0"),
        ({"check": -1}, "use 0 or more"),
        ({"check": 0}, "rows of layer 0 depend on the token alone: use"),
        ({"check": 0, "probes": "query"}, "check=0 measures nothing"),  # weights are distances there
        ({"check": 0, "probes": "query", "weights": "none", "match": "union"}, "check=0 measures nothing"),
        ({"check": 0, "probes": "query", "weights": "none", "drift": 0.9}, "check=0 measures nothing"),
        ({"first": -1}, "use 0 or more"),
        ({"clip": 0.0}, "above 0"),
        ({"drift": -1.0}, "above 0"),
        ({"old_group": 0}, "use 1 or more"),
        ({"store_mb": 0}, "use 1 or more"),
    ],
)
def test_knobs_out_of_range_are_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        AgentKVShift(**knobs)
    if knobs.get("check") == 0:
        assert AgentKVShift(**knobs, stored=Kivi()).check == 0  # what the store lost stands in layer 0 too


def test_a_check_layer_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"check=3 of agentkvshift is no layer of this model, which has 0 to 2"
    ):
        encoded(AgentKVShift(check=3))


def test_the_question_is_needed_where_probes_depend_on_it() -> None:
    assert AgentKVShiftPlus().needs_query and not AgentKVShift().needs_query
    with pytest.raises(UserError, match="agentkvshift_plus chooses tokens by the question"):
        AgentKVShiftPlus().encode(helpers.model("llama"), CONTEXT)
    with pytest.raises(UserError, match="agentkvshift_plus chooses tokens by the question"):
        AgentKVShiftPlus().encode(helpers.model("llama"), CONTEXT, query=())
    with pytest.raises(ValueError, match="2 contexts need one query"):
        AgentKVShiftPlus().encode(helpers.model("llama"), [CONTEXT, CONTEXT], query=[QUERY])


def test_tensors_of_one_axis_stand_for_ids() -> None:
    model, method = helpers.model("llama"), AgentKVShiftPlus(recompute="0.3")
    given, asked = torch.tensor(IDS[:9]), torch.tensor(QUERY)
    pairs: list[tuple[Any, Any, Any, Any]] = [
        (IDS[:9], QUERY, given, asked),
        (CONTEXT, QUERY, CONTEXT, asked),
        ([CONTEXT, CONTEXT], [QUERY, QUERY], [CONTEXT, CONTEXT], [asked, asked]),
        ([CONTEXT, CONTEXT], [QUERY, QUERY], [CONTEXT, CONTEXT], torch.stack([asked, asked]).unbind()),
    ]
    for context, query, as_tensor, asked_as_tensor in pairs:
        plain = method.encode(model, context, query=query)
        same = method.encode(model, as_tensor, query=asked_as_tensor)
        assert all(torch.equal(a.keys, b.keys) for a, b in zip(plain.layers, same.layers, strict=True))
    with pytest.raises(UserError, match=r"a query is a list of token ids, .* shape \(1, 4\).*ids\[0\]"):
        method.encode(model, CONTEXT, query=asked[None])
    with pytest.raises(UserError, match=r"a context is a list of token ids, .* shape \(1, 9\)"):
        method.encode(model, given[None], query=QUERY)


def test_a_context_without_units_is_its_header() -> None:
    header = Context(IDS[:5], ())
    for method in (AgentKVShift(), AgentKVShiftPlus()):
        cache = encoded(method, context=header)
        assert (cache.seen, cache.counters["reused"], cache.counters["recomputed"]) == (5, 0, 0)
        assert encoded(method, context=Context((), ())).seen == 0


def test_units_of_one_token_work() -> None:
    context = Context(IDS[:2], tuple((token,) for token in IDS[2:9]))
    cache = encoded(AgentKVShift(recompute="0.1"), context=context)
    assert cache.report.union == 7  # ceil(0.1 * 1) of each
    with torch.no_grad():
        assert_same(cache, Reference("llama", context).fresh)
