"""The canonical form of samples, and resuming."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvexp.errors import UserError
from kvexp.report.samples import SampleFile, canonical, line

PLAN = [["a", "b", "c"], ["d", "e"], ["f"]]


def batch(ids: list[str]) -> list[dict]:
    return [{"id": name, "scores": {"red": -0.123456, "blue": -1.0}, "answer": name.upper()} for name in ids]


def written(path, batches) -> bytes:
    file = SampleFile(path)
    file.resume(PLAN)
    for ids in batches:
        file.append(batch(ids))
    return path.read_bytes()


def test_one_line_has_fixed_order_and_rounding():
    sample = {
        "zeta": 1,
        "stop": "\n",
        "scores": {"red": np.float32(-0.25), "blue": -1.23456},
        "alpha": (True, None),
        "id": "x",
        "seed": np.int64(3),
    }
    expected = (
        b'{"id": "x", "seed": 3, "scores": {"blue": -1.2346, "red": -0.25}, "stop": "\\n", '
        b'"alpha": [true, null], "zeta": 1}\n'
    )
    assert line(sample) == expected
    assert line(dict(reversed(sample.items()))) == expected


def test_negative_zero_is_zero():
    assert json.dumps(canonical([-0.0, -0.00001, 0.00005001])) == "[0.0, 0.0, 0.0001]"


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("-inf")])
def test_a_score_that_is_not_finite_is_refused_by_sample(value):
    with pytest.raises(ValueError, match=r"sample 'x': -?(nan|inf) is not a finite number"):
        line({"id": "x", "scores": {"red": value}})


def test_values_that_are_not_plain_and_missing_ids_are_refused():
    with pytest.raises(ValueError, match="sample 'x': object is not plain data"):
        line({"id": "x", "scores": object()})
    with pytest.raises(ValueError, match="string as id, not 7"):
        line({"id": 7})


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_survives_in_one_line(text):
    data = line({"id": "x", "answer": text})
    assert data.count(b"\n") == 1 and data.endswith(b"\n")
    assert json.loads(data.decode("utf-8"))["answer"] == text


@given(st.floats(-1e6, 1e6))
def test_rounding_is_within_half_a_step_and_idempotent(number):
    rounded = canonical(number)
    assert abs(rounded - number) <= 0.5001e-4
    assert canonical(rounded) == rounded


def test_append_needs_the_plan_and_a_batch_that_is_to_come(tmp_path):
    file = SampleFile(tmp_path / "s.jsonl")
    with pytest.raises(ValueError, match="call resume"):
        file.append(batch(["a"]))
    assert file.resume(PLAN) == [0, 1, 2]
    with pytest.raises(ValueError, match="no batch of the plan that is still to come"):
        file.append(batch(["a", "b"]))
    for ids in reversed(PLAN):
        file.append(batch(ids))
    with pytest.raises(ValueError, match=r"still to come has the ids \['f'\]"):
        file.append(batch(["f"]))
    assert [sample["id"] for sample in file.read()] == list("fdeabc")
    assert file.resume(PLAN) == [] and [sample["id"] for sample in file.read()] == list("abcdef")


def test_a_plan_that_names_a_sample_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match="twice"):
        SampleFile(tmp_path / "s.jsonl").resume([["a"], ["a"]])


def test_every_cut_point_resumes_to_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    whole = written(tmp_path / "whole.jsonl", PLAN)
    ends = [0]
    for ids in PLAN:
        ends.append(ends[-1] + sum(len(line(sample)) for sample in batch(ids)))
    for size in range(len(whole) + 1):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(whole[:size])
        file = SampleFile(path)
        left = file.resume(PLAN)
        whole_ones = sum(end <= size for end in ends[1:])
        assert left == list(range(whole_ones, 3))
        assert path.read_bytes() == whole[: ends[whole_ones]]
        for number in left:
            file.append(batch(PLAN[number]))
        assert path.read_bytes() == whole


@pytest.mark.parametrize("at", [1, 3, 5])
@pytest.mark.parametrize("rubbish", [b"{]", b"\0" * 40, b"[]", b'{"id": 7}', b""])
def test_a_damaged_line_is_kept_aside_and_its_batch_done_again(tmp_path, at, rubbish, caplog):
    path = tmp_path / "s.jsonl"
    whole = written(path, PLAN)
    lines = whole.splitlines(keepends=True)
    damaged = b"".join([*lines[:at], rubbish + b"\n", *lines[at + 1 :]])
    path.write_bytes(damaged)
    file = SampleFile(path)
    [number] = file.resume(PLAN)
    assert number == {1: 0, 3: 1, 5: 2}[at]
    assert path.read_bytes() == b"".join(line for i, line in enumerate(lines) if "aaabbc"[i] != "abc"[number])
    file.append(batch(PLAN[number]))
    file.settle(list("abcdef"))
    assert path.read_bytes() == whole
    assert (tmp_path / "s.jsonl.damaged-1").read_bytes() == damaged
    assert f"line {at + 1} of {path} cannot be read" in caplog.text


def test_samples_of_another_run_are_refused_and_kept(tmp_path):
    path = tmp_path / "s.jsonl"
    before = written(path, PLAN)
    with pytest.raises(
        UserError, match=r"line 2 of .*s\.jsonl is 'b', which is not a sample of this run: start"
    ):
        SampleFile(path).resume([["a", "x", "c"], ["d", "e"], ["f"]])
    with pytest.raises(UserError, match="line 6 of"):
        SampleFile(path).resume(PLAN[:2])
    assert path.read_bytes() == before


def test_other_batches_of_the_same_samples_continue(tmp_path):
    path = tmp_path / "s.jsonl"
    whole = written(path, PLAN)
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:5]))
    file = SampleFile(path)
    assert file.resume([["a", "b"], ["c", "d", "e", "f"]]) == [1]
    file.append(batch(["c", "d", "e", "f"]))
    assert path.read_bytes() == whole


@given(st.data())
def test_any_ranks_any_cuts_any_number_of_times(data):
    """Each start has a number of ranks of its own; each rank is cut anywhere, also inside a line."""
    plan = [[f"{n}{x}" for x in "xyz"[: 1 + n % 3]] for n in range(7)]
    order = sorted(one for ids in plan for one in ids)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(os, "fsync"):
        path = Path(folder) / "s.jsonl"
        for _ in range(data.draw(st.integers(1, 4))):
            left = SampleFile(path).resume(plan)
            ranks = data.draw(st.integers(1, 3))
            for rank in range(ranks):
                mine = left[rank::ranks]
                file = SampleFile(path)
                if rank:
                    file = file.shard(rank, [plan[number] for number in mine])
                else:
                    file.resume(plan)
                for number in mine[: data.draw(st.integers(0, len(mine)))]:
                    file.append(batch(plan[number]))
                if file.path.exists() and data.draw(st.booleans()):
                    os.truncate(file.path, data.draw(st.integers(0, file.path.stat().st_size)))
        last = SampleFile(path)
        for number in last.resume(plan):
            last.append(batch(plan[number]))
        last.settle(order)
        assert path.read_bytes() == b"".join(line(sample) for sample in batch(order))
        assert last.settled(order) and os.listdir(folder) == ["s.jsonl"]


def test_settling_brings_shards_together_and_a_second_time_is_as_good(tmp_path):
    path = tmp_path / "s.jsonl"
    first = SampleFile(path)
    first.resume(PLAN)
    other = first.shard(2, PLAN[:2])
    with pytest.raises(ValueError, match="still to come"):
        other.append(batch(PLAN[2]))
    other.append(batch(PLAN[1]))
    other.append(batch(PLAN[0]))
    first.append(batch(PLAN[2]))
    assert sorted(os.listdir(tmp_path)) == ["s.2.jsonl", "s.jsonl"]
    with pytest.raises(ValueError, match="exactly the samples"):
        first.settle(list("abcdefg"))
    shard = other.path.read_bytes()
    first.settle(list("abcdef"))
    assert [sample["id"] for sample in first.read()] == list("abcdef") and not other.path.exists()
    other.path.write_bytes(shard)  # as a kill between the two would leave it
    assert first.settled(list("abcdef"))
    first.settle(list("abcdef"))
    assert os.listdir(tmp_path) == ["s.jsonl"]


RUN = """
    import sys, time
    from kvexp.report.folder import RunFolder
    plan = [[f"d{n}" for n in range(start, start + 4)] for start in range(0, 48, 4)]
    folder = RunFolder(sys.argv[1])
    with folder.lock():
        for ids in [plan[number] for number in folder.resume(plan)]:
            time.sleep(float(sys.argv[2]))
            folder.append([{"id": i, "scores": {"x": len(i) / 7}, "answer": i * 300} for i in ids])
"""


def test_a_run_killed_at_random_points_ends_with_the_bytes_of_an_uninterrupted_one(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(RUN)]
    subprocess.run([*command, str(tmp_path / "whole"), "0"], check=True)
    whole = (tmp_path / "whole" / "samples.jsonl").read_bytes()
    path, draw, kills = tmp_path / "cut" / "samples.jsonl", random.Random(4), 0
    while True:
        run = subprocess.Popen([*command, str(tmp_path / "cut"), "0.01"])
        until = min(_size(path) + draw.randrange(12_000), len(whole) + 1)
        while run.poll() is None and _size(path) < until:
            time.sleep(0.001)
        if run.poll() is not None:
            break
        run.send_signal(signal.SIGKILL)
        run.wait()
        kills += 1
        if draw.random() < 0.5:  # as a kill in the middle of a write would leave it
            os.truncate(path, max(0, _size(path) - draw.randrange(2000)))
    assert run.returncode == 0
    assert kills >= 3
    assert path.read_bytes() == whole


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
