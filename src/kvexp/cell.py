"""The cell: a short hash of every choice that can change what a run answers.

Two runs with one cell are the same experiment, whatever machine, folder, logger or launcher they used; their
files are shared. The hash is taken over canonical JSON, so that it does not depend on the order of keys.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvexp.schema import Settings

CELL_DIGITS = 10
# What a model is called here, where it runs, and what its configuration says anyway.
_ELSEWHERE = ("name", "device", "device_map", "tp_plan", "full_attention")


def canonical(value: object) -> str:
    """Return the JSON text of plain data: keys sorted, no spaces, NaN and infinity refused.

    Raises:
        TypeError: something is not plain data (dataclasses, mappings, sequences, numbers, text, None).
        ValueError: a number is NaN or infinite.
    """
    return json.dumps(
        _plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def cell_hash(identity: Mapping[str, object]) -> str:
    """Return ten hexadecimal digits that stand for `identity`, the resolved choices that matter."""
    return hashlib.sha256(canonical(identity).encode("ascii")).hexdigest()[:CELL_DIGITS]


def identity(settings: Settings) -> dict[str, Any]:
    """Return every choice that can change an answer, and none of paths, devices, loggers and batch sizes."""
    model = {key: item for key, item in knobs(settings.model).items() if key not in _ELSEWHERE}
    if not settings.model.compiled:  # sums in another order: where two tokens are level, the other may win
        del model["compiled"]  # cells of before keep their names
    calibration = {"name": settings.calibration.name, **settings.calibration.learnt()}
    if settings.calibration_task is not None:
        calibration["task"] = {"name": settings.calibration.task, **knobs(settings.calibration_task)}
    return {
        "model": model,
        "method": {"name": settings.choices["method"], **knobs(settings.method)},
        "task": {"id": settings.choices["task"], **knobs(settings.task)},
        "calibration": calibration if settings.method.needs_calibration else None,
        "empty_prefix": settings.calibration.empty_prefix,  # changes the context of every method
        "budget": str(settings.budget),
        "seed": settings.seed,
        "split": settings.split,
        "limit": settings.limit,
        "fidelity": settings.fidelity,
        **({"sampling": knobs(settings.sampling)} if settings.task.kind == "questions" else {}),
    }


def knobs(instance: object) -> dict[str, object]:
    """Return the fields of a method's or task's dataclass as plain data."""
    if not dataclasses.is_dataclass(instance) or isinstance(instance, type):
        raise TypeError(f"{type(instance).__name__} is not a dataclass instance, so it has no knobs")
    return {field.name: _plain(getattr(instance, field.name)) for field in dataclasses.fields(instance)}


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Fraction | Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = getattr(value, "id", None)  # a part of a composed method: two methods may have the same knobs
        return knobs(value) if name is None else {"name": str(name), **knobs(value)}
    if isinstance(value, Mapping):
        return {_key(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} is not plain data and cannot be part of a cell")


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"the key {key!r} of a cell is not text")
    return key
