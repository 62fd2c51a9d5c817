"""The run folder: status, records, setting aside, and simultaneous starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvexp.errors import UserError
from kvexp.report.folder import RunFolder


def test_status_goes_from_new_to_partial_to_complete(tmp_path, make_record):
    folder = RunFolder(tmp_path / "cell")
    assert folder.status == "new"
    with folder.lock():
        assert folder.status == "new"
        folder.write_config("budget: 1024\n")
        assert folder.status == "partial"
        folder.write_record(make_record(error="out of memory"))
        assert folder.status == "partial"
        folder.write_record(make_record())
        assert folder.status == "complete"
    assert folder.record() == make_record()
    assert (folder.path / "config.yaml").read_text() == "budget: 1024\n"


def test_a_record_that_breaks_the_schema_is_not_written(tmp_path, make_record):
    folder = RunFolder(tmp_path)
    folder.write_record(make_record())
    bad = make_record()
    del bad["cache"]["entries_peak"]
    with pytest.raises(ValueError, match=r"cache\.entries_peak is missing"):
        folder.write_record(bad)
    assert folder.record() == make_record()


@pytest.mark.parametrize("text", ['{"schema": 1', '{"schema": 2}', "[]"])
def test_a_record_that_cannot_be_read_is_refused_until_it_is_set_aside(tmp_path, text):
    folder = RunFolder(tmp_path)
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(UserError, match=r"record\.json cannot be read \(.*\): start with resume=false"):
        _ = folder.status
    folder.set_aside()
    assert folder.status == "new"


def test_setting_aside_keeps_everything_of_every_earlier_run(tmp_path, make_record):
    folder = RunFolder(tmp_path)
    folder.log.write_text("waiting\n")
    assert folder.set_aside() is None and folder.status == "new"
    for number in (1, 2):
        folder.write_config(f"run: {number}\n")
        folder.write_memory({"fingerprint": "abc"})
        folder.log.write_text("said\n")
        folder.resume([["a"]])
        folder.append([{"id": "a", "answer": str(number)}])
        folder.write_record(make_record())
        assert folder.set_aside() == tmp_path / f"old-{number}"
        assert folder.status == "new" and folder.samples() == []
    for number in (1, 2):
        old = RunFolder(tmp_path / f"old-{number}")
        assert old.status == "complete"
        assert old.samples() == [{"id": "a", "answer": str(number)}]
        assert sorted(path.name for path in old.path.iterdir()) == [
            "config.yaml",
            "log.txt",
            "memory.json",
            "record.json",
            "samples.jsonl",
        ]


def test_a_log_that_is_open_stays_the_log_of_this_run(tmp_path, make_record):
    folder = RunFolder(tmp_path)
    folder.write_record(make_record())
    folder.log.write_text("of the first run\n")
    with open(folder.log, "a") as log:
        aside = folder.set_aside()
        print("of the second run", file=log)
    assert (aside / "log.txt").read_text() == "of the first run\n"
    assert folder.log.read_text() == "of the second run\n"


def test_the_lock_clears_what_killed_writers_left(tmp_path):
    (tmp_path / ".record.json.00.tmp").write_text("{")
    with RunFolder(tmp_path).lock():
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]


START = """
    import json, os, sys, time
    from pathlib import Path
    from kvexp.report.folder import RunFolder
    folder = RunFolder(sys.argv[1])
    with folder.lock():
        if folder.status == "complete":
            print("done already")
            sys.exit(0)
        plan = [[str(n)] for n in range(10)]
        for number in folder.resume(plan):
            folder.append([{"id": i} for i in plan[number]])
            time.sleep(0.02)
        record = json.loads(Path(sys.argv[2]).read_text())
        record["provenance"]["command"] = str(os.getpid())
        folder.write_record(record)
        print("computed")
"""


def test_eight_simultaneous_starts_compute_once(tmp_path, make_record):
    template = tmp_path / "template.json"
    template.write_text(json.dumps(make_record()))
    cell = tmp_path / "cell"
    command = [sys.executable, "-c", textwrap.dedent(START), str(cell), str(template)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    runs = [subprocess.Popen(command, **pipes) for _ in range(8)]
    outputs = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [0] * 8
    said = [out.strip() for out, _ in outputs]
    assert sorted(said) == ["computed"] + ["done already"] * 7
    winner = runs[said.index("computed")].pid
    assert RunFolder(cell).record()["provenance"]["command"] == str(winner)
    assert [sample["id"] for sample in RunFolder(cell).samples()] == [str(n) for n in range(10)]
    assert sorted(path.name for path in cell.iterdir()) == [".lock", "record.json", "samples.jsonl"]
    waited = [err for _, err in outputs if err]
    assert waited and all(_names_a_run(err, runs) for err in waited)


def _names_a_run(line: str, runs: list[subprocess.Popen]) -> bool:
    holders = {f"process {run.pid} on {os.uname().nodename}" for run in runs}
    return line.count("\n") == 1 and any(holder in line for holder in holders)


def test_a_run_folder_needs_no_folder_to_exist(tmp_path):
    folder = RunFolder(tmp_path / "a" / "b")
    assert folder.samples() == [] and folder.record() is None
    folder.resume([["x"]])
    folder.append([{"id": "x"}])
    assert Path(tmp_path / "a" / "b" / "samples.jsonl").exists()


@pytest.mark.parametrize("text", ['{"model_sha256": "ab', "[1]", '{"model_sha256": 3}'])
def test_damaged_inputs_are_one_sentence(tmp_path, text):
    (tmp_path / "inputs.json").write_text(text)
    with pytest.raises(UserError, match=r"inputs\.json is damaged: start with resume=false") as caught:
        RunFolder(tmp_path).check_inputs({"model_sha256": "ab"})
    assert "\n" not in str(caught.value)
