"""Every run below a folder is either a record or a named problem."""

from __future__ import annotations

import json

import pytest

from kvexp.errors import UserError
from kvexp.report.collect import KINDS, collect


def kinds(found):
    return sorted((problem.kind, problem.folder.rpartition("/")[2]) for problem in found.problems)


def test_nothing_is_dropped_in_silence(tmp_path, make_record, make_samples, store):
    rows = make_samples([1, 0])
    store(tmp_path / "good", make_record("full", "full"), rows)
    store(tmp_path / "failed", make_record(error="no memory left"), [])
    broken = store(tmp_path / "broken", make_record(seed=1), rows)
    (tmp_path / "broken/record.json").write_text(json.dumps({**broken, "schema": 7}))
    store(tmp_path / "torn", make_record(seed=2), rows)
    (tmp_path / "torn/record.json").write_text("{")
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial/config.yaml").write_text("seed: 3\n")
    (tmp_path / "partial/samples.jsonl").write_text('{"id": "0"}\n{"id": "1"}\n{"id"')
    lost = store(tmp_path / "lost", make_record(seed=4), rows)
    (tmp_path / "lost/samples.jsonl").write_text("no json\n")
    store(tmp_path / "good2/old-1", make_record(seed=5), rows)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/log.txt").write_text("only a log\n")

    found = collect([tmp_path])
    assert kinds(found) == [
        ("broken", "broken"),
        ("broken", "torn"),
        ("failed", "failed"),
        ("lost", "lost"),
        ("partial", "partial"),
    ]
    assert sorted(record["cell"] for record in found.records) == sorted(
        ["fullfull0", "snapkv10240", lost["cell"]]
    )
    said = {problem.kind: problem.reason for problem in found.problems}
    assert said["partial"] == "2 samples on disk" and said["failed"] == "no memory left"
    assert {problem.kind for problem in found.problems} <= set(KINDS)


@pytest.mark.parametrize(
    ("kept", "reason"), [("lines", "it holds 1 of 3 items"), ("bytes", "its last line is torn")]
)
def test_samples_that_were_cut_are_lost(kept, reason, tmp_path, make_record, make_samples, store):
    record = make_record()
    record["metrics"] = {"accuracy": {**record["metrics"]["accuracy"], "n": 3}}
    store(tmp_path / "run", record, make_samples([1, 0, 1]))
    path = tmp_path / "run" / "samples.jsonl"
    assert not collect([tmp_path]).problems
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"\n") + 1] if kept == "lines" else whole[:-20])
    [problem] = collect([tmp_path]).problems
    assert problem.kind == "lost" and problem.reason == f"samples.jsonl: {reason}"


def test_the_items_of_a_text_are_its_blocks(tmp_path, make_record, make_samples, store):
    """Errors of a continuation are over blocks, of which a sample holds several."""
    record = make_record()
    record["metrics"]["accuracy"]["n"] = 5
    rows = [
        {**row, "blocks": {"accuracy": [1.0] * n}}
        for row, n in zip(make_samples([1, 1]), (2, 3), strict=True)
    ]
    store(tmp_path / "run", record, rows)
    (tmp_path / "run/record.json").write_text(json.dumps(record))  # over more items than there are samples
    assert not collect([tmp_path]).problems
    (tmp_path / "run/samples.jsonl").write_text(json.dumps(rows[0]) + "\n")
    [problem] = collect([tmp_path]).problems
    assert problem.reason == "samples.jsonl: it holds 2 of 5 items"


def test_a_folder_named_twice_counts_once(tmp_path, make_record, make_samples, store):
    store(tmp_path / "a/run", make_record(), make_samples([1]))
    found = collect([tmp_path, tmp_path / "a", str(tmp_path / "a/../a")])
    assert len(found.records) == 1 and not found.problems


@pytest.mark.parametrize("order", [("early", "late"), ("late", "early")])
def test_of_one_cell_the_run_that_finished_later_counts(order, tmp_path, make_record, store):
    for name in order:
        record = make_record()
        record["provenance"]["finished"] = {"early": "2026-01-01", "late": "2026-02-01"}[name]
        store(tmp_path / name, record, [])
    failed = make_record(error="out of time")
    failed["provenance"]["finished"] = "2026-03-01"
    store(tmp_path / "failed", failed, [])
    found = collect([tmp_path])
    assert [record["folder"].rpartition("/")[2] for record in found.records] == ["late"]
    assert kinds(found) == [("repeated", "early"), ("repeated", "failed")]


def test_a_selection_drops_the_failures_of_what_it_drops(tmp_path, make_record, store):
    store(tmp_path / "a", make_record(), [])
    store(tmp_path / "b", make_record(seed=1, error="no"), [])
    (tmp_path / "c").mkdir()
    (tmp_path / "c/config.yaml").write_text("")
    found = collect([tmp_path])
    kept = found.only([record for record in found.records if record["status"] == "complete"])
    assert kinds(kept) == [("partial", "c")]


def test_a_mistake_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="is no folder: name one that holds runs"):
        collect([tmp_path / "nowhere"])
    with pytest.raises(UserError, match=r"there is no run below .*: run a cell first"):
        collect([tmp_path])
