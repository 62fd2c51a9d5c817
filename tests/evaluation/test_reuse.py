"""Reuse methods in whole runs: what stands in the record, and methods that encode for each question."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cells import samples_of
from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.evaluation.questions import planned
from kvexp.prompt import Context
from kvexp.run import run

NOTES = ("task=state_change", "task.n=2", "task.names=2", "task.changes=2", "model=tiny-llama")


def small(folder: Path, *words: str) -> Any:
    [settings] = settings_of([*NOTES, "logger=none", f"output_dir={folder}", *words])
    return settings


def scores(settings: Any) -> list[float]:
    return [json.loads(line)["scores"]["logprob"] for line in samples_of(settings).splitlines()]


@pytest.mark.parametrize("method", ["agentkvshift", "prophetkv"])
def test_with_a_share_of_one_a_run_is_that_of_full(method: str, tmp_path: Path) -> None:
    full, ours = small(tmp_path, "method=full"), small(tmp_path, f"method={method}", "method.recompute=1")
    run(full)
    record = run(ours)
    assert scores(ours) == pytest.approx(scores(full), abs=2e-3)
    assert record["cache"]["reused"] == 0 and record["cache"]["recomputed"] >= record["cache"]["reusable"] > 0
    assert record["choices"]["budget"] == "full"


@pytest.mark.parametrize("method", ["prophetkv", "agentkvshift_plus", "cacheblend"])
def test_the_batch_changes_nothing(method: str, tmp_path: Path) -> None:
    words = (f"method={method}", "method.recompute=0.2")
    one, many = (
        small(tmp_path / "one", *words, "batch_size=1"),
        small(tmp_path / "many", *words, "batch_size=8"),
    )
    record = run(one)
    assert run(many)["metrics"] == record["metrics"] and samples_of(one) == samples_of(many)
    cache = record["cache"]
    for name in ("reused", "recomputed", "reusable", "unit_tokens", "union", "moved_bytes"):
        assert cache[name] > 0
    assert cache["recomputed"] < cache["reusable"]
    assert (cache["question_rows"] > 0) == (method != "cacheblend")


def test_the_store_is_shared_by_the_contexts_of_a_run_and_on_disk_by_runs(tmp_path: Path) -> None:
    words = ("method=agentkvshift_plus", "method.store=disk", "batch_size=1")
    first = run(small(tmp_path, *words))["cache"]
    assert first["store_misses"] > 0
    assert first["store_hits"] > 0  # the second question on a context
    again = run(small(tmp_path, *words, "resume=false"))["cache"]
    assert again["store_misses"] == 0
    assert again["store_hits"] == 12  # the three notes of each of four questions
    assert again["hit_rate"] == 1.0
    assert [*(tmp_path / "store").glob("chunks-*/*.safetensors")]


def test_each_question_has_its_own_encoding_where_a_method_reads_it() -> None:
    class Q:
        def __init__(self, name: str, length: int) -> None:
            self.id, self.context = name, Context((), (tuple(range(length)),))

    questions = [Q("a", 5), Q("b", 90), Q("c", 5), Q("d", 7)]
    plans = [[one.id for one in batch] for batch in planned(questions, 2, 1, apart=True)]  # type: ignore[arg-type]
    assert plans == [["a", "c"], ["d", "b"]]
    plans = [[one.id for one in batch] for batch in planned(questions[:3], 4, 2, apart=True)]  # type: ignore[arg-type]
    assert plans == [["a/0", "a/1", "c/0", "c/1"], ["b/0", "b/1"]]


def test_a_task_without_questions_is_refused_by_methods_that_read_them(tmp_path: Path) -> None:
    words = ["model=tiny-llama", "task=intents", "method=prophetkv", f"output_dir={tmp_path}"]
    with pytest.raises(UserError, match="chooses by the question before it is asked"):
        settings_of(words)
