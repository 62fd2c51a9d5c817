"""Residuals of tiny models against loops over tokens, and layers and units of which it is known."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import helpers
from agentkvshift_reference import reference
from kvexp.errors import UserError
from kvexp.measure.residuals import ESTIMATORS, PARTS, ResidualMeter, fresh_rows
from kvexp.methods.reuse.agentkvshift import AgentKVShift
from kvexp.methods.reuse.geometry import Geometry
from kvexp.methods.reuse.probes import drawn, top_of_units
from kvexp.methods.storage.kivi import Kivi
from kvexp.prompt import Context
from reuse_reference import Reference

IDS = helpers.tokens(40, seed=5)
CONTEXT = Context(IDS[:3], (IDS[3:14], IDS[14:20], IDS[20:29]))
METHOD = AgentKVShift(recompute="0.25", encoded="alone")


def measured(family: str, method: AgentKVShift = METHOD, *contexts: Context) -> ResidualMeter:
    meter = ResidualMeter(helpers.model(family), method)
    for context in contexts or (CONTEXT,):
        meter(context)
    return meter


@cache
@torch.no_grad()
def placed() -> Reference:
    return Reference("llama", CONTEXT, "alone")


def off(layer: int, part: str) -> dict[int, torch.Tensor]:
    """Fresh minus stored rows [H, D] of the tokens of units, by position."""
    ref, which = placed(), int(part == "values")
    found = {}
    for i in ref.tokens:
        row = ref.fresh[layer][which][i] - ref.stale[layer][which][i]
        found[i] = ref.rotate(row, -i) if part == "keys" else row
    return found


def energy(rows: Any) -> float:
    return sum(float(row.double().square().sum()) for row in rows)


@pytest.mark.parametrize("encoded", ["behind_header", "old_context", "alone"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "phi3", "deepseek_v3"])
def test_nothing_is_off_in_layer_0(family: str, encoded: Any) -> None:
    """Keys and values there depend on the token alone, once keys have been moved exactly."""
    found = measured(family, AgentKVShift(encoded=encoded, old_group=2)).sums
    for part in PARTS:
        relative = [float(one[part].figures()["relative"]) for one in found]
        assert relative[0] < 1e-11 and min(relative[1:]) > 1e-4


def test_a_unit_behind_its_own_prefix_is_not_off() -> None:
    alone = Context(CONTEXT.header, CONTEXT.chunks[:1])
    found = measured("qwen3", AgentKVShift(), alone)
    for one in found.sums:
        assert one["keys"].figures()["relative"] < 1e-10
        assert one["values"].figures()["unit_share"].isnan()


def test_figures_are_those_of_loops() -> None:
    meter, ref = measured("llama"), placed()
    for layer in range(1, ref.layers):
        for part in PARTS:
            rows, figures = off(layer, part), meter.sums[layer][part].figures()
            total = energy(rows.values())
            states = energy(ref.fresh[layer][int(part == "values")][i] for i in ref.tokens)
            means = [torch.stack([rows[i] for i in unit]).double().mean(0) for unit in ref.units]
            explained = sum(len(unit) * energy([m]) for m, unit in zip(means, ref.units, strict=True))
            lengths = [float(head.norm()) for row in rows.values() for head in row]
            expected = {
                "relative": total / states,
                "explained": explained / total,
                "first": energy(rows[unit[0]] for unit in ref.units) / total,
                "first_two": energy(rows[i] for unit in ref.units for i in unit[:2]) / total,
                "norm": sum(lengths) / len(lengths),
            }
            for name, value in expected.items():
                assert float(figures[name]) == pytest.approx(value, rel=1e-3), (layer, part, name)


def test_keys_are_as_long_before_rotation_as_after() -> None:
    for one in measured("phi3").sums[1:]:
        before, after = one["keys"].figures(), one["turned_keys"].figures()
        for name in ("norm", "relative", "first", "chance"):
            torch.testing.assert_close(before[name], after[name], atol=1e-6, rtol=1e-5)
        assert abs(float(before["explained"] - after["explained"])) > 1e-3


@pytest.mark.parametrize("name", ["agentkvshift", "top_unweighted"])
def test_held_out_energy_is_that_of_loops(name: str) -> None:
    meter, ref = measured("llama"), placed()
    knobs: dict[str, Any] = {} if name == "agentkvshift" else {"weights": "none"}
    method = AgentKVShift(recompute="0.25", encoded="alone", **knobs)
    rows, union = reference(method, ref, ())
    held = [i for i in ref.tokens if i not in union]
    assert meter.held_out[name] == len(held) and meter.tokens == len(ref.tokens)
    for layer in range(1, ref.layers):
        for which, part in enumerate(("keys", "values")):
            left = energy(ref.fresh[layer][which][i] - rows[layer][which][i] for i in held)
            before = energy(ref.fresh[layer][which][i] - ref.stale[layer][which][i] for i in held)
            removed = float(meter.removed[layer][name][part].removed())
            assert removed == pytest.approx(1 - left / before, abs=1e-3), (layer, part)


def test_the_oracle_is_the_mean_of_all_tokens_on_those_that_random_probes_leave() -> None:
    meter, ref = measured("llama"), placed()
    geometry = Geometry.of([CONTEXT], [], torch.device("cpu"))
    counts = [METHOD.count(unit.length) for unit in geometry.units]
    sets = [top_of_units(geometry, drawn(geometry, f"0 {name}"), counts)[0] for name in ("keys", "values")]
    held = [i for i in ref.tokens if not (sets[0] | sets[1])[i]]
    assert meter.held_out["oracle"] == meter.held_out["random_unweighted"] == len(held)
    for layer in range(1, ref.layers):
        for part in ("keys", "values"):
            rows, left = off(layer, part), 0.0
            for unit in ref.units:
                mean = torch.stack([rows[i] for i in unit]).mean(0)
                left += energy(rows[i] - mean for i in unit if i in held)
            before = energy(rows[i] for i in held)
            removed = float(meter.removed[layer]["oracle"][part].removed())
            assert removed == pytest.approx(1 - left / before, abs=1e-3)


def test_contexts_add_up_and_known_fresh_rows_change_nothing() -> None:
    model, other = helpers.model("qwen3"), helpers.context(4, 9, 3, seed=6)
    meter = ResidualMeter(model, METHOD)
    for context in (CONTEXT, other):
        meter(context, fresh_rows(METHOD, model, context))
    again = measured("qwen3", METHOD, CONTEXT, other)
    assert meter.tokens == again.tokens == 26 + 36
    for mine, theirs in zip(meter.removed, again.removed, strict=True):
        for name in ESTIMATORS:
            pair = (x[name]["values"].removed(by_head=True) for x in (mine, theirs))
            torch.testing.assert_close(*pair, equal_nan=True)
    for one, two in zip(meter.sums, again.sums, strict=True):
        for part in PARTS:
            for name, value in one[part].figures(by_head=True).items():
                torch.testing.assert_close(value, two[part].figures(by_head=True)[name], equal_nan=True)


def test_rows_in_few_bits_are_off_everywhere() -> None:
    packed = measured("llama", AgentKVShift(stored=Kivi(bits=2)))
    assert min(float(one["values"].figures()["relative"]) for one in packed.sums) > 1e-3


def test_a_method_that_reads_a_question_is_refused() -> None:
    with pytest.raises(UserError, match=r"use method.probes=divergence"):
        ResidualMeter(helpers.model("llama"), AgentKVShift(probes="query"))
