"""Means over tasks, as suites and papers report them: one more group, of the rows that every task has.

A mean is unweighted over tasks, of each task's first score; it is made for a model whose tasks each have one
setting, a score that is better when higher, and rows (method with its knobs, budget) in common. Its standard
error takes the tasks as independent.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

MEAN = "mean"
Group = Mapping[str, Any]
Row = Mapping[str, Any]


def means(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the group of means of each model that has one."""
    found = []
    for model in dict.fromkeys(group["model"] for group in groups):
        mine = [g for g in groups if g["model"] == model and g["metrics"] and g["higher"][g["metrics"][0]]]
        tasks = [group["task"] for group in mine]
        if len(tasks) > 1 and len(set(tasks)) == len(tasks) and (rows := _rows(mine)):
            found.append(_group(mine, rows))
    return found


def _rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the rows that all groups have, in the order of the first."""
    by_key = [{_key(row): row for row in g["rows"] if g["metrics"][0] in row["metrics"]} for g in groups]
    shared = [key for key in by_key[0] if all(key in rows for rows in by_key)]
    return [_row(groups, [rows[key] for rows in by_key]) for key in shared]


def _key(row: Row) -> tuple[str, str]:
    return row["label"], row["budget"]


def _row(groups: Sequence[Group], rows: Sequence[Row]) -> dict[str, Any]:
    entries = [row["metrics"][group["metrics"][0]] for group, row in zip(groups, rows, strict=True)]
    parts = {f"{MEAN} [{group['task']}]": entry for group, entry in zip(groups, entries, strict=True)}
    costs = {
        name: [row["cost"][name] for row in rows if row["cost"][name] is not None] for name in rows[0]["cost"]
    }
    return {
        **{key: rows[0][key] for key in ("label", "method", "budget")},
        "seeds": sorted({seed for row in rows for seed in row["seeds"]}),
        "cells": [],
        "failed": [error for row in rows for error in row["failed"]],
        "metrics": {MEAN: _mean(entries), **parts},
        "cost": {name: statistics.fmean(found) if found else None for name, found in costs.items()},
        "steps": dict.fromkeys(rows[0]["steps"]),
        "latency": None,
        "curves": {along: {} for along in rows[0]["curves"]},
    }


def _mean(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    value = statistics.fmean(entry["value"] for entry in entries)
    errors = {name: _error([entry[name] for entry in entries]) for name in ("se", "se_seeds")}
    reach = 1.96 * max(errors["se"] or 0.0, errors["se_seeds"] or 0.0)
    return {
        "value": value,
        **errors,
        "n": sum(entry["n"] for entry in entries),
        "low": value - reach,
        "high": value + reach,
    }


def _error(errors: Sequence[float | None]) -> float | None:
    """Return the standard error of a mean of independent values, None where one has none."""
    known = [error for error in errors if error is not None]
    return sum(error**2 for error in known) ** 0.5 / len(known) if len(known) == len(errors) else None


def _group(groups: Sequence[Group], rows: list[dict[str, Any]]) -> dict[str, Any]:
    name = f"mean over {len(groups)} tasks"
    return {
        "title": f"{name} · {groups[0]['model']}",
        "task": name,
        "model": groups[0]["model"],
        "setting": "",
        "seeds": sorted({seed for group in groups for seed in group["seeds"]}),
        "items": [],
        "context": [],
        "full_mib": [],
        "metrics": [MEAN],
        "higher": {MEAN: True},
        "rows": rows,
        "parts": [f"{MEAN} [{group['task']}]" for group in groups],
        "differences": [],
        "calibration": [],
        "papers": [],
    }
