"""What the page, the tables and the figures say of a group of runs, as plain data.

Numbers of a row are means over its seeds; errors are `Estimate`'s. A difference is a row minus `full` on the
same items, with Holm's correction over all rows of the group for one metric.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvexp.report.grid import Paired, Row, estimate, headlines, paired, setting_of
from kvexp.report.groups import Group
from kvexp.report.items import Items, Record
from kvexp.report.latency import latency_of
from kvexp.report.significance import holm, verdict

MIB = 2**20
WORDS = {
    "kl": "KL from full (nats)",
    "top1_agreement": "top-1 agreement",
    "f1": "F1",
    "macro_f1": "macro F1",
    "macro_f1_calibrated": "macro F1 calibrated",
    "nll": "NLL",
    "nll_full": "NLL of full",
    "logprob": "log-probability",
    "log_z_error": "error of log Z (nats)",
}
COSTS: Mapping[str, Callable[[Record], float | None]] = {
    "peak_rows": lambda r: r["cache"]["entries_peak"],
    "kv_tokens": lambda r: r["cache"]["kv_token_equivalents"],
    "mib": lambda r: r["cache"]["bytes_peak"] / MIB,
    "prepare_s": lambda r: r["timing"]["prepare_s"],
    "encode_s": lambda r: r["timing"]["encode_s"],
    "first_token_s": lambda r: r["timing"]["first_token_s"],
    "token_ms": lambda r: _inverse(r["timing"]["decode_tokens_per_s"]),
    "total_s": lambda r: r["timing"]["total_s"],
}
STEPS = ("p50", "p99", "max")


def group_facts(group: Group, items: Items) -> dict[str, Any]:
    """Return everything that is shown of one group."""
    rows = group.grid.rows
    complete = [record for row in rows for record in row.records]
    names = list(dict.fromkeys(name for record in complete for name in record["metrics"]))
    plain = [name for name in names if "[" not in name]
    parts = [name for name in names if "[" in name]
    shown = headlines(group.grid)
    ordered = [*(name for name in shown if name in plain), *(n for n in plain if n not in shown)]
    higher = {n: m["higher_is_better"] for r in complete for n, m in r["metrics"].items()}
    told = [_row(row, [*ordered, *parts], items) for row in rows]
    for name in names:
        _add_interval([row["metrics"][name] for row in told if name in row["metrics"]], higher[name])
    return {
        "title": group.title,
        "task": group.grid.task,
        "model": group.grid.model,
        "setting": group.words,
        "notes": next((setting_of(r).get("task.notes.name") for r in complete), None),
        "seeds": sorted({r["choices"]["seed"] for row in rows for r in (*row.records, *row.failed)}),
        "items": _range(m["n"] for r in complete for n, m in r["metrics"].items() if "[" not in n),
        "context": _range(r["cache"]["context_tokens"] for r in complete),
        "full_mib": _range(round(r["cache"]["bytes_full"] / MIB, 1) for r in complete),
        "metrics": ordered,
        "higher": higher,
        "rows": told,
        "parts": parts,
        "differences": [d for name in shown for d in _differences(group, name, items)],
    }


def _row(row: Row, metrics: Sequence[str], items: Items) -> dict[str, Any]:
    found = {name: estimate(row, name, items) for name in metrics}
    return {
        "label": row.label,
        "method": row.method,
        "budget": row.budget,
        "seeds": [record["choices"]["seed"] for record in row.records],
        "cells": [record["cell"] for record in (*row.records, *row.failed)],
        "failed": [record["error"] for record in row.failed],
        "metrics": {
            name: {
                "value": one.value,
                "se": one.se_items,
                "se_seeds": one.se_seeds,
                "n": max(r["metrics"][name]["n"] for r in row.records if name in r["metrics"]),
            }
            for name, one in found.items()
            if one is not None
        },
        "cost": {name: mean_of(row.records, read) for name, read in COSTS.items()},
        "steps": {name: mean_of(row.records, _step(name)) for name in STEPS},
        "latency": latency_of(row.records),
        "curves": _curves(row.records),
    }


def _add_interval(entries: Sequence[dict[str, Any]], higher: bool) -> None:
    """Add `low` and `high`: 1.96 of the larger standard error around each value of one score.

    An interval does not leave the range of the score: none below 0 where no value is, nor above 1 for shares.
    """
    values = [one["value"] for one in entries]
    least = 0.0 if min(values) >= 0 else -math.inf
    most = 1.0 if least == 0 and higher and max(values) <= 1 else math.inf
    for one in entries:
        error = 1.96 * max(one["se"] or 0.0, one["se_seeds"] or 0.0)
        one["low"], one["high"] = max(least, one["value"] - error), min(most, one["value"] + error)


def _differences(group: Group, metric: str, items: Items) -> list[dict[str, Any]]:
    pairs = [pair for row in group.grid.rows if (pair := paired(group.grid, row, metric, items))]
    adjusted = holm([pair.p for pair in pairs])
    return [_difference(pair, p) for pair, p in zip(pairs, adjusted, strict=True)]


def _difference(pair: Paired, adjusted: float) -> dict[str, Any]:
    higher = all(r["metrics"][pair.metric]["higher_is_better"] for r in pair.row.records)
    return {
        "label": pair.row.label,
        "method": pair.row.method,
        "budget": pair.row.budget,
        "metric": pair.metric,
        "items": pair.items,
        "value": pair.difference.value,
        "se": pair.difference.se_items,
        "se_seeds": pair.difference.se_seeds,
        "low": pair.low,
        "high": pair.high,
        "wins": pair.wins,
        "losses": pair.losses,
        "p": pair.p,
        "holm": adjusted,
        "verdict": verdict(pair.difference.value, pair.low, pair.high, adjusted, higher),
    }


def mean_of(records: Sequence[Record], read: Callable[[Record], float | None]) -> float | None:
    """Return the mean of what `read` finds in records, None where it finds nothing."""
    found = [value for record in records if (value := read(record)) is not None]
    return statistics.fmean(found) if found else None


def _curves(records: Sequence[Record]) -> dict[str, dict[str, list[float]]]:
    """Return what is known by position in generated text and by layer: lists averaged over seeds."""
    curves: dict[str, dict[str, list[float]]] = {}
    for along in ("by_position", "by_layer"):
        having = [(r["fidelity"] or {}).get(along) for r in records]
        lists: dict[str, list[list[float]]] = {}
        for found in filter(None, having):
            for name, values in found.items():
                if isinstance(values, list):
                    lists.setdefault(name, []).append(values)
        curves[along] = {
            name: [statistics.fmean(column) for column in zip(*several, strict=False)]
            for name, several in lists.items()
        }
    return curves


def _step(name: str) -> Callable[[Record], float | None]:
    def read(record: Record) -> float | None:
        seconds = record["timing"].get(f"step_{name}_s")
        return None if seconds is None else 1000 * seconds

    return read


def _inverse(tokens_per_s: float | None) -> float | None:
    return 1000 / tokens_per_s if tokens_per_s else None


def _range(values: Any) -> list[float]:
    """Return the smallest and the largest, one number where they are equal, nothing where there is none."""
    found = sorted(set(values))
    return [found[0], found[-1]] if len(found) > 1 else found


def words(name: str) -> str:
    """Return a score's name for people."""
    return WORDS.get(name, name.replace("_", " "))
