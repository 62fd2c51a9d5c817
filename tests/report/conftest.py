"""Records, samples and stored runs for the tests of the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvexp.report.record import build_record, metric

CACHE = {
    "context_tokens": 4096,
    "entries_nominal": 1024,
    "entries_peak": 1024,
    "entries_mean": 1000.5,
    "bytes_peak": 3 * 2**20,
    "bytes_full": 12 * 2**20,
    "kv_token_equivalents": 1024.0,
    "evicted": 3072,
}


def build(
    method: str = "snapkv",
    budget: int | str = 1024,
    seed: int = 0,
    *,
    accuracy: float = 0.5,
    stderr: float | None = 0.1,
    n: int = 8,
    error: str | None = None,
    calibrated: float | None = None,
    cache: dict[str, Any] | None = None,
    timing: dict[str, float | None] | None = None,
    **choices: Any,
) -> dict[str, Any]:
    """Return a valid record."""
    metrics = {"accuracy": metric(accuracy, stderr, n)}
    if calibrated is not None:
        metrics["accuracy_calibrated"] = metric(calibrated, stderr, n)
    chosen = {"model": "tiny", "method": method, "task": "intents", "budget": budget, "seed": seed, **choices}
    return build_record(
        cell=f"{method}{budget}{seed}",
        choices=chosen,
        metrics={} if error else metrics,
        cache={} if error else {**CACHE, **(cache or {})},
        timing=timing or {"encode_s": 2.0, "decode_tokens_per_s": 50.0, "total_s": 9.0},
        provenance={"device": "cpu"},
        error=error,
    )


def build_samples(
    correct: list[int], *, seed: int = 0, queries: str = "q", calibrated: list[int] | None = None
):
    """Return one sample for each entry of `correct`, answered right (1) or wrong (0)."""
    rows = []
    for index, right in enumerate(correct):
        row = {
            "id": str(index),
            "sample": 0,
            "seed": seed,
            "query": f"{queries}{index}",
            "answer": "red" if right else "blue",
            "expected": "red",
        }
        if calibrated:
            row["scores"] = {"accuracy": float(right), "accuracy_calibrated": float(calibrated[index])}
        rows.append(row)
    return rows


def _over(entry: Any, rows: int) -> Any:
    sound = isinstance(entry, dict) and isinstance(entry.get("n"), int)
    return {**entry, "n": min(entry["n"], rows)} if sound else entry


def store_run(folder: Path, result: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Write a run folder; return the record, over no more items than `rows`, as `read_records` does."""
    folder.mkdir(parents=True)
    if rows and isinstance(result.get("metrics"), dict):
        metrics = result["metrics"].items()
        result = {**result, "metrics": {key: _over(entry, len(rows)) for key, entry in metrics}}
    (folder / "record.json").write_text(json.dumps(result))
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {**result, "folder": str(folder)}


@pytest.fixture(scope="session")
def make_record():
    """The function that builds a valid record."""
    return build


@pytest.fixture(scope="session")
def make_samples():
    """The function that builds samples from a list of right (1) and wrong (0)."""
    return build_samples


@pytest.fixture(scope="session")
def store():
    """The function that writes a run folder."""
    return store_run
