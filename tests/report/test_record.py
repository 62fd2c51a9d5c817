"""The schema of record.json, and reading many."""

from __future__ import annotations

import copy
import json
import math

import pytest

from kvexp.report.record import build_record, dump_record, metric, read_records, validate_record


def change(record: dict, path: str, value: object) -> dict:
    """Return a copy with the dotted `path` set to `value`, or removed when `value` is ...."""
    changed = copy.deepcopy(record)
    *parents, last = path.split(".")
    place = changed
    for parent in parents:
        place = place[parent]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return changed


def test_a_record_has_the_keys_of_schema_1_in_order(make_record):
    record = make_record()
    assert list(record) == [
        "schema",
        "cell",
        "status",
        "error",
        "choices",
        "metrics",
        "cache",
        "timing",
        "fidelity",
        "provenance",
    ]
    assert record["schema"] == 1 and record["status"] == "complete" and record["error"] is None
    assert record["metrics"]["accuracy"] == {"value": 0.5, "stderr": 0.1, "n": 8, "higher_is_better": True}
    assert record["cache"]["looked_up"] == 0 and record["cache"]["evicted"] == 3072
    assert record["timing"]["prepare_s"] is None
    assert json.loads(dump_record(record)) == record


def test_a_failed_record_keeps_one_line_and_what_was_measured(make_record):
    error = "evicted is 0: nothing happened\nTraceback ..."
    record = build_record(
        cell="c",
        choices=make_record()["choices"],
        timing={"encode_s": 1.5},
        provenance={},
        error=error,
    )
    assert record["status"] == "failed" and record["error"] == "evicted is 0: nothing happened"
    assert record["timing"]["encode_s"] == 1.5 and record["cache"] == {}
    assert build_record(cell="c", choices=make_record()["choices"], provenance={}, error=" ")["error"]


def test_a_nan_that_failed_a_run_does_not_cost_the_rest_of_its_record(make_record):
    good = make_record()
    parts = {key: good[key] for key in ("choices", "cache", "timing", "provenance")}
    bad = {"accuracy": metric(math.nan, 0.1, 8)}
    with pytest.raises(ValueError, match=r"metrics\.accuracy\.value"):
        build_record(cell="c", metrics=bad, **parts)
    record = build_record(cell="c", metrics=bad, fidelity={"kl": math.inf}, error="nan", **parts)
    assert record["metrics"] == {} and record["fidelity"] is None
    assert record["cache"] == good["cache"] and record["timing"] == good["timing"]


def test_the_knobs_of_a_cell_stand_beside_its_choices(make_record):
    record = build_record(
        cell="c", choices=make_record()["choices"], provenance={}, error="x", identity={"a": 1}
    )
    assert record["identity"] == {"a": 1}
    assert "identity" not in make_record()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", 2, "schema must be 1, not 2"),
        ("cell", "", "cell must be a non-empty string"),
        ("status", "done", "status must be"),
        ("error", "oops", "error must be null in a complete record"),
        ("error", ..., "error must be null in a complete record"),
        ("metrics", {}, "metrics must not be empty"),
        ("metrics", None, "metrics must be an object"),
        ("metrics.accuracy.value", "0.5", r"metrics\.accuracy\.value must be a number"),
        ("metrics.accuracy.value", True, r"metrics\.accuracy\.value must be a number"),
        ("metrics.accuracy.value", math.nan, r"metrics\.accuracy\.value must be a finite number, not nan"),
        ("metrics.accuracy.stderr", -0.1, r"metrics\.accuracy\.stderr must be null or"),
        ("metrics.accuracy.stderr", ..., r"metrics\.accuracy\.stderr is missing"),
        ("metrics.accuracy.n", 0, r"metrics\.accuracy\.n must be an integer above 0"),
        ("metrics.accuracy.higher_is_better", ..., r"higher_is_better must be true or false"),
        ("choices.method", ..., r"choices\.method must be a non-empty string"),
        ("choices.budget", "4k", r"choices\.budget must be 'full' or at least 1"),
        ("choices.budget", 0, r"choices\.budget must be 'full' or at least 1"),
        ("choices.seed", 1.0, r"choices\.seed must be an integer"),
        ("cache.bytes_peak", ..., r"cache\.bytes_peak is missing"),
        ("cache.entries_peak", None, r"cache\.entries_peak must not be null"),
        ("cache.evicted", -1, r"cache\.evicted must be a number of at least 0"),
        ("timing.total_s", ..., r"timing\.total_s is missing"),
        ("timing.encode_s", math.inf, r"timing\.encode_s must be a finite number"),
        ("fidelity", ..., "fidelity is missing"),
        ("fidelity", 0.1, "fidelity must be an object or null"),
        ("provenance.git", ..., r"provenance\.git is missing"),
        ("provenance.extra", [1.0, math.nan], r"provenance\.extra\[1\] must be a finite number"),
    ],
)
def test_a_bad_record_is_refused_by_key(make_record, path, value, message):
    with pytest.raises(ValueError, match=message):
        validate_record(change(make_record(), path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("cache.entries_nominal", None),
        ("metrics.accuracy.stderr", None),
        ("choices.budget", "full"),
        ("fidelity", {"kl": 0.1, "by_position": [0.1, 0.2]}),
        ("added_later", {"anything": 1}),
        ("timing.first_token_s", None),
    ],
)
def test_a_good_variation_is_accepted(make_record, path, value):
    validate_record(change(make_record(), path, value))


def test_a_failed_record_needs_a_reason_of_one_line(make_record):
    failed = make_record(error="no memory")
    validate_record(failed)
    for reason in (None, "", "two\nlines"):
        with pytest.raises(ValueError, match="error must be one line"):
            validate_record({**failed, "error": reason})


def test_reading_many_skips_old_runs_and_tells_of_broken_ones(tmp_path, make_record, store):
    store(tmp_path / "b", make_record(seed=1), [])
    store(tmp_path / "a", make_record(seed=0), [])
    store(tmp_path / "a" / "old-1", make_record(seed=0), [])
    store(tmp_path / "c", {"schema": 1, "cell": "x"}, [])
    store(tmp_path / "d", make_record(), [])
    (tmp_path / "d" / "record.json").write_text('{"schema": 1,')
    said: list[str] = []
    records = read_records(tmp_path, said.append)
    assert [(record["choices"]["seed"], record["folder"]) for record in records] == [
        (0, str(tmp_path / "a")),
        (1, str(tmp_path / "b")),
    ]
    assert len(said) == 2
    assert said[0] == f"{tmp_path / 'c' / 'record.json'} is left out: status must be 'complete' or 'failed'"
    assert said[1].startswith(f"{tmp_path / 'd' / 'record.json'} is left out: ")
