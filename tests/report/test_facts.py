"""What a report says of a group: costs, errors, differences and curves."""

from __future__ import annotations

import pytest

from kvexp.report.facts import group_facts
from kvexp.report.groups import groups
from kvexp.report.items import Items


def facts(records):
    (group,) = groups(records)
    return group_facts(group, Items())


def test_costs_are_means_over_seeds_in_the_units_that_are_named(make_record):
    records = [
        make_record(seed=0, timing={"encode_s": 2.0, "decode_tokens_per_s": 50.0, "total_s": 9.0}),
        make_record(seed=1, timing={"encode_s": 4.0, "decode_tokens_per_s": None, "total_s": 9.0}),
    ]
    (row,) = facts(records)["rows"]
    assert row["cost"] == {
        "peak_rows": 1024,
        "kv_tokens": 1024,
        "mib": 3,
        "prepare_s": None,
        "encode_s": 3.0,
        "first_token_s": None,
        "token_ms": 20.0,
        "total_s": 9.0,
    }


def test_steps_and_curves(make_record):
    first, second = make_record(seed=0), make_record(seed=1)
    first["timing"] |= {"step_p50_s": 0.25, "step_p99_s": 1.0, "step_max_s": 2.0}
    decays = [{"kl": [0.1, 0.3], "queries": 8}, {"kl": [0.3, 0.5], "queries": 8}]
    for record, decay in zip((first, second), decays, strict=True):
        record["fidelity"] = {"kl": 0.2, "by_position": decay}
    first["fidelity"]["by_layer"] = {"relative_error": [0.5, 0.25]}
    (row,) = facts([first, second])["rows"]
    assert row["steps"] == {"p50": 250.0, "p99": 1000.0, "max": 2000.0}
    assert row["curves"]["by_position"] == {"kl": pytest.approx([0.2, 0.4])}
    assert row["curves"]["by_layer"] == {"relative_error": [0.5, 0.25]}


def test_differences_are_corrected_over_the_rows_of_one_score(tmp_path, make_record, make_samples, store):
    right = {"full": [1] * 12, "a": [0] * 12, "b": [0] * 6 + [1] * 6, "c": [1] * 11 + [0]}
    records = [
        store(tmp_path / name, make_record(name, "full" if name == "full" else 64), make_samples(answers))
        for name, answers in right.items()
    ]
    found = {one["label"]: one for one in facts(records)["differences"]}
    # Two-sided: 2 / 2^12, 2 / 2^6 and 1, the smallest times 3, the next times 2, the last times 1.
    assert {name: one["p"] for name, one in found.items()} == {"a": 2 / 4096, "b": 2 / 64, "c": 1.0}
    assert {name: one["holm"] for name, one in found.items()} == {"a": 6 / 4096, "b": 4 / 64, "c": 1.0}
    assert {n: one["verdict"] for n, one in found.items()} == {
        "a": "worse",
        "b": "not shown",
        "c": "not shown",
    }
    assert found["b"]["value"] == -0.5


def test_parts_stand_apart_from_scores_and_failures_are_told(make_record):
    record = make_record()
    record["metrics"]["accuracy [easy]"] = {**record["metrics"]["accuracy"], "value": 0.9, "n": 4}
    found = facts([record, make_record(seed=1, error="no memory")])
    assert (found["metrics"], found["parts"], found["items"]) == (["accuracy"], ["accuracy [easy]"], [8])
    (row,) = found["rows"]
    assert row["metrics"]["accuracy [easy]"]["value"] == 0.9
    assert (row["failed"], row["seeds"], found["seeds"]) == (["no memory"], [0], [0, 1])


def test_a_group_without_a_result(make_record):
    found = facts([make_record(error="no")])
    assert (found["metrics"], found["items"], found["rows"][0]["metrics"]) == ([], [], {})


def test_an_interval_stays_within_the_range_of_the_score(make_record):
    def entry(value, higher):
        return {"value": value, "stderr": 0.25, "n": 4, "higher_is_better": higher}

    records = []
    for budget, share, kl, logprob in ((64, 0.0, 1.5, -0.25), (128, 1.0, 0.25, 0.5)):
        record = make_record("snapkv", budget)
        record["metrics"] = {
            "accuracy": entry(share, True),
            "kl": entry(kl, False),
            "logprob": entry(logprob, True),
        }
        records.append(record)
    first, second = (row["metrics"] for row in facts(records)["rows"])
    bounds = [(one["low"], one["high"]) for one in (first["accuracy"], second["accuracy"])]
    assert bounds == [(0.0, pytest.approx(0.49)), (pytest.approx(0.51), 1.0)]
    assert (second["kl"]["low"], second["kl"]["high"]) == (0.0, pytest.approx(0.74))
    assert (first["logprob"]["low"], first["logprob"]["high"]) == pytest.approx((-0.74, 0.24))
