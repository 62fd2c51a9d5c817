"""Records and samples as they lie on disk, read with suspicion: what passes here breaks no table or figure.

A file may be cut, edited by hand or written by something else. Whatever is wrong with it is a ValueError that
says what, so that the run is named as one that cannot be used and the others are reported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvexp.report.record import validate_record

DEEPEST = 64  # nested objects and lists: far more than any record has, far less than Python's stack holds
LARGEST = 1e150  # of a number: its square, which errors and figures need, is a number too
CURVES = ("by_position", "by_layer")


def parse(text: bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, for a number that is none and deep nesting too."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise ValueError("is nested too deeply")
        for item in level:
            if isinstance(item, float) and not math.isfinite(item):
                raise ValueError(f"holds {item}, which is no finite number")
        inner = [item.values() if isinstance(item, dict) else item for item in level if _nested(item)]
        level = [item for items in inner for item in items]
    return value


def read_record(path: Path) -> dict[str, Any]:
    """Return a schema-1 record. Raises OSError, or ValueError when the file holds none."""
    record = parse(path.read_bytes())
    validate_record(record)
    return record


def check_shown(record: Mapping[str, Any]) -> None:
    """Raise ValueError, which names the key, for what a record may hold but no table or figure can show."""
    _check_size(record, "")
    identity = record.get("identity") or {}
    sampling = identity.get("sampling") or {}
    _need(isinstance(sampling, Mapping), "identity.sampling must be an object or null")
    drawn = sampling.get("samples")
    _need(drawn is None or (_is_number(drawn) and drawn >= 0), "identity.sampling.samples must be a number")
    for name, value in record["timing"].items():
        _need(value is None or _is_number(value), f"timing.{name} must be a number or null")
    for along in CURVES:
        curves = (record["fidelity"] or {}).get(along) or {}
        _need(isinstance(curves, Mapping), f"fidelity.{along} must be an object")
        for name, values in curves.items():
            numbers = not isinstance(values, list) or all(map(_is_number, values))
            _need(numbers, f"fidelity.{along}.{name} must be numbers")


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Return the samples of a run in order, without a torn last line, [] where there is no file.

    Raises OSError, or ValueError, which names the line, for one that is no sample or has an unsound score.
    """
    rows = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    samples = []
    for number, row in enumerate(rows, 1):
        try:
            sample = parse(row)
            _check_sample(sample)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        samples.append(sample)
    return samples


def _check_sample(sample: Any) -> None:
    _need(isinstance(sample, dict), f"is {_kind(sample)}, not the object of a sample")
    _need(isinstance(sample.get("id"), str), "id must be a string")
    scores = sample.get("scores")
    _need(scores is None or isinstance(scores, dict), "scores must be an object")
    _check_size(sample, "")


def _check_size(value: Any, key: str) -> None:
    """Refuse numbers with which nothing can be calculated, of an object that is not nested too deeply."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            _check_size(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_size(item, f"{key}[{index}]")
    elif _is_number(value):
        _need(abs(value) <= LARGEST, f"{key} must be a number below {LARGEST:g}")


def _nested(value: Any) -> bool:
    return isinstance(value, dict | list)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", type(None): "null"}.get(type(value), "a bare value")


def _need(condition: bool, rule: str) -> None:
    if not condition:
        raise ValueError(rule)
