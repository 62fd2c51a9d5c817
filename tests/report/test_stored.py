"""Files that hold something else than a run: each is named with its reason, and the report goes on."""

from __future__ import annotations

import json

import pytest

from kvexp.report import __main__ as command
from kvexp.report import paper_figures
from kvexp.report.collect import collect
from kvexp.report.stored import parse, read_samples

DEEP = "[" * 100_000 + "]" * 100_000
LINES = {
    '{"id": "0", "scores": {"accuracy": NaN}}': "holds nan, which is no finite number",
    '{"id": "0", "scores": {"accuracy": 1e999}}': "holds inf, which is no finite number",
    f'{{"id": "0", "scores": {{"accuracy": 1{"0" * 400}}}}}': "scores.accuracy must be a number below 1e+150",
    '{"id": "0", "scores": 1}': "scores must be an object",
    "[1,2]": "is a list, not the object of a sample",
    "null": "is null, not the object of a sample",
    '{"id": ["0"]}': "id must be a string",
    DEEP: "is nested too deeply",
}


def wrong(record, key, value):
    *folders, last = key.split("/")
    record = json.loads(json.dumps(record))
    place = record
    for folder in folders:
        place = place[folder]
    place[last] = value
    return json.dumps(record)


RECORDS = {
    "identity": ("identity", "words", "identity must be an object or null"),
    "sampling": ("identity", {"sampling": [1]}, "identity.sampling must be an object or null"),
    "curves": ("fidelity", {"by_position": [1]}, "fidelity.by_position must be an object"),
    "curve": ("fidelity", {"by_layer": {"kl": ["x"]}}, "fidelity.by_layer.kl must be numbers"),
    "value": ("metrics/accuracy/value", 1e308, "metrics.accuracy.value must be a number below 1e+150"),
    "step": ("timing/step_p50_s", "fast", "timing.step_p50_s must be a number or null"),
}


@pytest.mark.parametrize("row", LINES, ids=[*map(str, range(len(LINES)))])
def test_a_line_that_is_no_sample(row, tmp_path, make_record, make_samples, store):
    store(tmp_path / "good", make_record("full", "full"), make_samples([1]))
    store(tmp_path / "bad", make_record(), make_samples([1]))
    with open(tmp_path / "bad/samples.jsonl", "a") as file:
        file.write(row + "\n")
    found = collect([tmp_path])
    (problem,) = found.problems
    assert (problem.kind, problem.reason) == ("lost", f"samples.jsonl: line 2: {LINES[row]}")
    assert len(found.records) == 2


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_nothing_can_show(name, tmp_path, make_record, make_samples, store):
    key, value, reason = RECORDS[name]
    store(tmp_path / "good", make_record("full", "full"), make_samples([1]))
    store(tmp_path / "bad", make_record(), make_samples([1]))
    (tmp_path / "bad/record.json").write_text(wrong(make_record(), key, value))
    found = collect([tmp_path])
    (problem,) = found.problems
    assert (problem.kind, problem.reason) == ("broken", f"record.json: {reason}")
    assert [record["cell"] for record in found.records] == ["fullfull0"]


def test_the_whole_report_goes_on(tmp_path, make_record, make_samples, store, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("kvexp.report.page.plot_library", lambda: "lib")
    monkeypatch.setattr(paper_figures, "draw_figures", lambda data, folder: None)
    runs = tmp_path / "runs"
    store(runs / "good", make_record("full", "full"), make_samples([1]))
    for place, row in enumerate(LINES):
        store(runs / f"line{place}", make_record("snapkv", 512, place), make_samples([1]))
        (runs / f"line{place}/samples.jsonl").write_text(row + "\n")
    for name, (key, value, _) in RECORDS.items():
        store(runs / name, make_record(), [])
        (runs / name / "record.json").write_text(wrong(make_record(), key, value))
    store(runs / "deep", make_record(), [])
    (runs / "deep/record.json").write_text(DEEP)
    (runs / "good/memory.json").write_text('{"manifest": {"seen": NaN}}')
    (runs / "folder/samples.jsonl").mkdir(parents=True)
    (runs / "folder/config.yaml").write_text("seed: 0")
    assert command.main([str(runs), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out/report.md").read_text()
    assert f"{len(RECORDS) + 1} broken, {len(LINES)} lost, 1 partial" in text
    assert "line 1: holds nan" in (tmp_path / "out/index.html").read_text()
    capsys.readouterr()


def test_what_is_sound_comes_back(tmp_path):
    assert parse(b'{"a": [1, 2.5, null, {"b": "c"}]}') == {"a": [1, 2.5, None, {"b": "c"}]}
    (tmp_path / "s").write_text('{"id": "0", "scores": {"red": -1e100}}\n{"id": "1"')
    assert read_samples(tmp_path / "s") == [{"id": "0", "scores": {"red": -1e100}}]
    assert read_samples(tmp_path / "none") == []
