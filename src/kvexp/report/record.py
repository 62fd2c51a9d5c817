"""`record.json`, schema 1: what one cell of the grid cost and what it scored.

Fields may be added freely; the meaning of one never changes. Counts of rows and entries are per layer and KV
head, bytes are bytes, times are seconds: prepare_s to build or load a memory (the prefix is encoded there),
encode_s from a context to a cache that queries fork, first_token_s from there to the logits of one batch of
queries (mean over batches), total_s everything, loading included. decode_tokens_per_s counts the tokens of
all rows of a batch after their first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvexp.files import Say, tell

SCHEMA = 1
COUNTERS = ("evicted", "looked_up", "reused", "recomputed")
STORAGE = (
    "context_tokens",
    "entries_nominal",
    "entries_peak",
    "entries_mean",
    "bytes_peak",
    "bytes_full",
    "kv_token_equivalents",
)
TIMING = ("prepare_s", "encode_s", "first_token_s", "decode_tokens_per_s", "total_s")
PROVENANCE = ("git", "versions", "device", "model_sha256", "data_sha256", "command")


def build_record(
    *,
    cell: str,
    choices: Mapping[str, Any],
    provenance: Mapping[str, Any],
    metrics: Mapping[str, Mapping[str, Any]] | None = None,
    cache: Mapping[str, Any] | None = None,
    timing: Mapping[str, float | None] | None = None,
    fidelity: Mapping[str, Any] | None = None,
    identity: Mapping[str, Any] | None = None,
    error: str | None = None,
) -> dict[str, Any]:
    """Return the record of one cell; it is complete when `error` is None, else failed.

    `cache` must hold every key of `STORAGE`; counters that it lacks are 0. Timings that were not taken are
    None. A failed record keeps whatever was measured before the failure; `error` is cut to its first line.
    Raises ValueError, which names the key, when the result breaks the schema.
    """
    measured = dict(cache or {})
    if error is None:
        measured = {**measured, **{name: measured.get(name, 0) for name in COUNTERS}}
    record = {
        "schema": SCHEMA,
        "cell": cell,
        "status": "complete" if error is None else "failed",
        "error": None if error is None else _first_line(error),
        "choices": dict(choices),
        **({} if identity is None else {"identity": dict(identity)}),
        "metrics": {name: dict(metric) for name, metric in (metrics or {}).items()},
        "cache": measured,
        "timing": {**dict.fromkeys(TIMING), **(timing or {})},
        "fidelity": None if fidelity is None else dict(fidelity),
        "provenance": {**dict.fromkeys(PROVENANCE), **provenance},
    }
    if error is not None:
        _drop_unsound(record)
    validate_record(record)
    return record


def metric(value: float, stderr: float | None, n: int, higher_is_better: bool = True) -> dict[str, Any]:
    """Return one entry of `metrics`; `n` is the number of items behind the value."""
    return {"value": value, "stderr": stderr, "n": n, "higher_is_better": higher_is_better}


def with_fidelity(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a record with its distance from full attention among the metrics, where it was measured."""
    measured = record["fidelity"] or {}
    more = {
        name: metric(measured[name], measured.get(f"{name}_stderr"), measured["n"], higher)
        for name, higher in (("kl", False), ("top1_agreement", True))
        if name in measured and "n" in measured and name not in record["metrics"]
    }
    return {**record, "metrics": {**record["metrics"], **more}} if more else record


def validate_record(record: Any) -> None:
    """Raise ValueError, which names the key, when `record` is not a schema-1 record."""
    _need(isinstance(record, Mapping), "record", "must be an object")
    _need(record.get("schema") == SCHEMA, "schema", f"must be {SCHEMA}, not {record.get('schema')!r}")
    _need(_is_text(record.get("cell")), "cell", "must be a non-empty string")
    _need(record.get("status") in ("complete", "failed"), "status", "must be 'complete' or 'failed'")
    complete, error = record["status"] == "complete", record.get("error")
    if complete:
        _need("error" in record and error is None, "error", "must be null in a complete record")
    else:
        _need(_is_text(error) and "\n" not in error, "error", "must be one line in a failed record")
    for key in ("choices", "metrics", "cache", "timing", "provenance"):
        _need(isinstance(record.get(key), Mapping), key, "must be an object")
    _need("fidelity" in record, "fidelity", "is missing")
    identity = record.get("identity")
    _need(identity is None or isinstance(identity, Mapping), "identity", "must be an object or null")
    _validate_choices(record["choices"])
    _validate_metrics(record["metrics"], complete)
    _validate_numbers(record["cache"], "cache", (*STORAGE, *COUNTERS) if complete else ())
    _validate_numbers(record["timing"], "timing", TIMING if complete else ())
    if record["fidelity"] is not None:
        _need(isinstance(record["fidelity"], Mapping), "fidelity", "must be an object or null")
    _validate_provenance(record["provenance"])
    _validate_finite(record, "")


def dump_record(record: Mapping[str, Any]) -> bytes:
    """Return the bytes of record.json. Raises ValueError when the record breaks the schema."""
    validate_record(record)
    return (json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_records(folder: str | Path, say: Say = tell) -> list[dict[str, Any]]:
    """Return every record below `folder`, each with its own folder under the key "folder", sorted by path.

    Records that resume=false set aside (`old-<n>/`) are left out. A record that cannot be read is told
    through `say`, one line each, and left out.
    """
    records = []
    for path in sorted(Path(folder).rglob("record.json")):
        if path.parent.name.startswith("old-"):
            continue
        try:
            record = json.loads(path.read_bytes())
            validate_record(record)
        except (OSError, ValueError, RecursionError) as error:
            say(f"{path} is left out: {error}")
            continue
        records.append({**record, "folder": str(path.parent)})
    return records


def _drop_unsound(record: dict[str, Any]) -> None:
    """Empty the sections that break the schema: a NaN that failed a run must not also cost its record."""
    empty: dict[str, Any] = {"metrics": {}, "cache": {}, "timing": dict.fromkeys(TIMING), "fidelity": None}
    for section in empty:
        try:
            validate_record({**record, **empty, section: record[section]})
        except ValueError:
            record[section] = empty[section]


def _validate_choices(choices: Mapping[str, Any]) -> None:
    for key in ("model", "method", "task"):
        _need(_is_text(choices.get(key)), f"choices.{key}", "must be a non-empty string")
    budget = choices.get("budget")
    _need(budget == "full" or _is_integer(budget, 1), "choices.budget", "must be 'full' or at least 1")
    _need(_is_integer(choices.get("seed")), "choices.seed", "must be an integer")


def _validate_metrics(metrics: Mapping[str, Any], complete: bool) -> None:
    _need(bool(metrics) or not complete, "metrics", "must not be empty in a complete record")
    for name, entry in metrics.items():
        key = f"metrics.{name}"
        _need(isinstance(entry, Mapping), key, "must be an object")
        _need(_is_number(entry.get("value")), f"{key}.value", "must be a number")
        _need("stderr" in entry, f"{key}.stderr", "is missing")
        stderr, higher = entry["stderr"], entry.get("higher_is_better")
        spread = stderr is None or (_is_number(stderr) and stderr >= 0)
        _need(spread, f"{key}.stderr", "must be null or a number of at least 0")
        _need(_is_integer(entry.get("n"), 1), f"{key}.n", "must be an integer above 0")
        _need(isinstance(higher, bool), f"{key}.higher_is_better", "must be true or false")


def _validate_numbers(section: Mapping[str, Any], name: str, required: tuple[str, ...]) -> None:
    """Check that the required keys are there; times may be null (not taken), and so may a nominal budget."""
    for key in required:
        _need(key in section, f"{name}.{key}", "is missing")
        may_be_null = name == "timing" or key == "entries_nominal"
        _need(section[key] is not None or may_be_null, f"{name}.{key}", "must not be null")
    for key, value in section.items():
        if key in STORAGE + COUNTERS + TIMING and value is not None:
            _need(_is_number(value) and value >= 0, f"{name}.{key}", "must be a number of at least 0")


def _validate_provenance(provenance: Mapping[str, Any]) -> None:
    for key in PROVENANCE:
        _need(key in provenance, f"provenance.{key}", "is missing")


def _validate_finite(value: Any, key: str) -> None:
    """Refuse NaN and infinities anywhere: JSON has none, and none is a result."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            _validate_finite(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _validate_finite(item, f"{key}[{index}]")
    elif isinstance(value, float):
        _need(math.isfinite(value), key, f"must be a finite number, not {value}")


def _need(condition: bool, key: str, rule: str) -> None:
    if not condition:
        raise ValueError(f"{key} {rule}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_integer(value: Any, minimum: int | None = None) -> bool:
    integer = isinstance(value, int) and not isinstance(value, bool)
    return integer and (minimum is None or value >= minimum)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0].strip() if lines else "unknown error"
