"""The file of single steps: what is kept of which batch, and what a run writes into it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cells import samples_of
from kvexp.cli import settings_of
from kvexp.measure import latency
from kvexp.measure.latency import LatencyFile, Steps
from kvexp.measure.timing import Stopwatch
from kvexp.model import load_once
from kvexp.run import run
from kvexp.tasks.batch import QueryBatch

DFS = ("task=recursive_state_query", "task.steps=6:14:2", "task.n_per_step=2", "task.max_new_tokens=30")
BUDGET, INTERVAL = 100, 8


class Ticks:
    """A clock whose readings lie 1, 2, 3, ... seconds apart."""

    def __init__(self) -> None:
        self.now, self.by = 0.0, 0

    def __call__(self) -> float:
        self.by += 1
        self.now += self.by
        return self.now


def stepped(watch: Stopwatch, gone: list[int]) -> Steps:
    """A batch whose steps let `gone` rows go."""
    counters = {"evicted": 5}
    steps = Steps(watch, counters)
    for rows in gone:
        with steps():
            counters["evicted"] += rows
    return steps


def test_steps_are_those_of_one_batch_and_marked_where_rows_left(tmp_path: Path) -> None:
    watch = Stopwatch(clock=Ticks())
    first, second = stepped(watch, [0, 3, 0]), stepped(watch, [1, 0])
    # A span lasts from one reading to the next: the 2nd, 4th, 6th, ... difference.
    assert (list(first.seconds)[:3], first.pruned) == ([2, 4, 6], [1])
    assert (list(second.seconds), second.pruned) == ([8, 10], [0])
    file = LatencyFile(tmp_path / "latency.json")
    file.add(["c", "d"], second)
    assert json.loads(file.path.read_bytes()) == {
        "batches": [{"samples": ["c", "d"], "steps": 2, "step_ms": [8000.0, 10000.0], "pruned": [0]}]
    }


def test_the_file_is_bounded_and_what_is_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "STEPS", 2)
    file = LatencyFile(tmp_path / "cell/latency.json")
    file.add(["none"], stepped(Stopwatch(), []))
    assert not file.path.exists()
    for name in "abacdef":
        file.add([name], stepped(Stopwatch(), [0, 1, 1]))
    batches = json.loads(file.path.read_bytes())["batches"]
    assert [one["samples"] for one in batches] == [["a"], ["b"], ["c"], ["d"]]
    assert all((one["steps"], len(one["step_ms"]), one["pruned"]) == (3, 2, [1]) for one in batches)
    before = file.path.read_bytes()
    LatencyFile(file.path).add(["a"], stepped(Stopwatch(), [1]))
    assert file.path.read_bytes() == before
    for damaged in ('{"batches": [', '{"batches": 3}', "[]", '{"batches": [3]}'):
        file.path.write_text(damaged)
        LatencyFile(file.path).add(["z"], stepped(Stopwatch(), [1]))
        assert [one["samples"] for one in json.loads(file.path.read_bytes())["batches"]] == [["z"]]


def small(folder: Path, *words: str) -> Any:
    common = ("model=tiny-llama", "logger=none", f"output_dir={folder}", "batch_size=2")
    [settings] = settings_of([*common, *DFS, *words])
    return settings


def traced(settings: Any) -> list[dict[str, Any]]:
    return json.loads((settings.run_dir / "latency.json").read_bytes())["batches"]


def prunes(context: int, query: int, made: int) -> set[int]:
    """The steps at which a sequence is back at the budget, while it is not at its end."""
    rows, found = min(context, BUDGET) + query, set()
    for step in range(-1, made - 1):  # the query is read before step 0
        rows += step >= 0
        if rows >= BUDGET + INTERVAL:
            rows = BUDGET
            found.add(step)
    return found - {-1}


def test_a_run_marks_the_steps_at_which_its_method_prunes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("method=snapkv", f"budget={BUDGET}", f"method.interval={INTERVAL}", "method.window=4")
    settings = small(tmp_path, *words)
    generate, calls = QueryBatch.generate, []

    def cut_short(self: QueryBatch, *args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("killed")
        return generate(self, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(QueryBatch, "generate", cut_short)
        with pytest.raises(RuntimeError, match="killed"):
            run(settings)
    before = traced(settings)
    assert len(before) == 2
    record = run(settings)
    batches = traced(settings)
    assert batches[:2] == before and len(batches) == latency.BATCHES < 5  # of five batches in all
    questions = {one.id: one for one in settings.load_task(load_once(settings.model).tokenizer).questions}
    lines = {one["id"]: one for one in map(json.loads, samples_of(settings).splitlines())}
    for batch in batches:
        made = {name: lines[name]["new_tokens"] for name in batch["samples"]}
        assert batch["steps"] == len(batch["step_ms"]) == max(made.values()) - 1 > 2 * INTERVAL
        assert min(batch["step_ms"]) > 0
        due = (
            prunes(len(questions[name].context), len(questions[name].query_ids), count)
            for name, count in made.items()
        )
        assert batch["pruned"] == sorted(set().union(*due)) and batch["pruned"]
    assert max(map(max, (one["step_ms"] for one in batches[2:]))) <= 1000 * record["timing"]["step_max_s"] + 1


@pytest.mark.parametrize("words", [("method=full",), ("method=full", "task.max_new_tokens=1")])
def test_full_attention_prunes_nowhere_and_one_token_takes_no_step(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    settings = small(tmp_path, *words, "task.n_per_step=1", "task.steps=6:8:2")
    run(settings)
    if len(words) > 1:
        assert not (settings.run_dir / "latency.json").exists()
    else:
        assert [one["pruned"] for one in traced(settings)] == [[]]
