"""Batches are shared by ranks without a gap, and samples do not depend on how many there are."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import crews
from cells import cell, samples_of
from kvexp import run as pipe
from kvexp.cli import settings_of
from kvexp.crew.crew import Crew
from kvexp.evaluation.shares import divided
from kvexp.measure.timing import Stopwatch
from kvexp.report.folder import RunFolder
from kvexp.schema import Settings

COMMON = ("model=tiny-llama", "logger=none", "batch_size=1")
CELLS = {
    "labels": "task=intents method=asm budget=32 calibration.n=8 limit=6 task.context_tokens=300"
    " task.n_labels=3 task.n_calibration=2",
    "questions": "task=passkey task.context_tokens=120 task.n=2 task.n_facts=2 method=snapkv budget=60"
    " fidelity=true",
    "continuation": "task=continuation task.n=4 task.prefill=40 task.length=80 method=streaming_llm"
    " budget=32",
}


def test_contexts_stay_together_and_shares_are_even() -> None:
    assert divided("aabbcd", 2) == [[0, 1, 4], [2, 3, 5]]
    assert divided("abab", 2) == [[0, 2], [1, 3]]
    assert divided("aaaabc", 3) == [[0, 1, 2, 3], [4], [5]]
    assert divided("aaaaa", 2) == [[0, 2, 4], [1, 3]]  # fewer contexts than ranks
    assert divided("ab", 3) == [[0], [1], []] and divided("", 2) == [[], []]
    assert divided("abc", 1) == [[0, 1, 2]]


def of(kind: str, folder: Path) -> Settings:
    [settings] = settings_of([*COMMON, *CELLS[kind].split(), f"output_dir={folder}"])
    return settings


def on(ranks: int, settings: Settings) -> dict[str, Any]:
    """Run a cell on several ranks, and return its record."""

    def rank(crew: Crew) -> Any:
        folder = RunFolder(settings.run_dir)
        if crew.first:
            return pipe._recorded(settings, folder, None, crew)
        assert crew.broadcast()
        return pipe._answered(settings, pipe._loaded(settings), folder, Stopwatch(), crew)

    record, *others = crews.together(ranks, rank)
    assert others == [None] * (ranks - 1)  # they have left
    return record


@pytest.mark.parametrize("kind", CELLS)
def test_samples_are_those_of_one_rank(kind: str, tmp_path: Path) -> None:
    one = of(kind, tmp_path / "1")
    record = pipe.run(one)
    for ranks in (2, 3):
        several = of(kind, tmp_path / str(ranks))
        found = on(ranks, several)
        assert samples_of(several) == samples_of(one)
        assert found["metrics"] == record["metrics"] and found["provenance"]["processes"] == ranks
        assert {path.name for path in several.run_dir.iterdir()} <= {
            *(".lock", "config.yaml", "inputs.json", "latency.json", "memory.json", "record.json"),
            "samples.jsonl",
        }
        for name in ("entries_peak", "bytes_peak", "context_tokens"):
            assert found["cache"][name] == record["cache"][name]
        for name in ("looked_up",) if kind == "labels" else ():  # what all have done together, and no twice
            assert record["cache"][name] <= found["cache"][name] < ranks * record["cache"][name]


def test_a_run_of_three_ranks_goes_on_with_two_and_then_one(tmp_path: Path) -> None:
    """Each rank is cut after a few batches; nothing is scored twice."""
    whole, settings = cell(tmp_path / "one", "batch_size=1"), cell(tmp_path / "many", "batch_size=1")
    pipe.run(whole)
    append, scored = RunFolder.append, []
    left: Counter[Path] = Counter()

    def interrupted(self: RunFolder, batch: Any) -> None:
        left[self._samples.path] += 1
        if left[self._samples.path] <= 2:  # the rest has not come about
            append(self, batch)
            scored.extend(sample["id"] for sample in batch)

    def killed(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "append", interrupted)
        patch.setattr(RunFolder, "settle", killed)
        for ranks in (3, 2):
            left.clear()
            with pytest.raises(KeyboardInterrupt):
                on(ranks, settings)
            assert len(list(settings.run_dir.glob("samples.*.jsonl"))) == ranks - 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "append", interrupted)
        left.subtract({settings.run_dir / "samples.jsonl": 100})
        on(1, settings)
    assert samples_of(settings) == samples_of(whole)
    rows = [json.loads(row)["id"] for row in samples_of(whole).splitlines()]
    assert sorted(scored) == sorted(rows) and not list(settings.run_dir.glob("samples.*.jsonl"))
