"""The data of the page: groups, one line for each cell, and what stands beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from kvexp.report.averages import means
from kvexp.report.collect import KINDS, Collected
from kvexp.report.colours import palette, shapes
from kvexp.report.details import memory_of
from kvexp.report.facts import COSTS, WORDS, group_facts
from kvexp.report.groups import Group
from kvexp.report.items import Items, Record
from kvexp.report.papers import beside
from kvexp.report.provenance import utc_now

CALIBRATION = (
    "traces",
    "trace_tokens",
    "calibration_tokens",
    "calibration_segments",
    "seen",
    "entries",
    "cost_traffic_rows",
    "cost_storage_rows",
    "log_z_std",
)


def page_data(
    collected: Collected,
    found: Sequence[Group],
    items: Items,
    folders: Sequence[str],
    experiment: str | None = None,
    missing: Sequence[str] = (),
) -> tuple[dict[str, Any], list[Record]]:
    """Return the page's data, and the records in the order of its `cells`."""
    facts = [group_facts(group, items) for group in found]
    for one, group in zip(facts, found, strict=True):
        one["calibration"] = _calibration(group)
        one["papers"] = beside(one, experiment)
    compared = [*means(facts), *facts]
    for one in compared:
        one["shapes"] = shapes(one["rows"])
    records, cells = [], []
    for one, group in zip(facts, found, strict=True):
        for row in group.grid.rows:
            for record in (*row.records, *row.failed):
                records.append(record)
                cells.append(_cell(record, row.label, one))
    states = Counter(problem.kind for problem in collected.problems)
    complete = sum(record["status"] == "complete" for record in records)
    said = [f"{complete} complete", *(f"{count} {kind}" for kind, count in sorted(states.items()))]
    data = {
        "title": f"{experiment}, kvexp report" if experiment else "kvexp report",
        "version": version("kvexp"),
        "made": utc_now(),
        "experiment": experiment,
        "folders": list(folders),
        "summary": ", ".join(said),
        "palette": palette([record["choices"]["method"] for record in records]),
        "words": WORDS,
        "groups": compared,
        "cells": cells,
        "problems": [vars(problem) for problem in collected.problems],
        "kinds": dict(KINDS),
        "missing": list(missing),
    }
    return data, records


def _cell(record: Record, label: str, group: Mapping[str, Any]) -> dict[str, Any]:
    choices, metrics = record["choices"], record["metrics"]
    name = next((name for name in group["metrics"] if name in metrics), None)
    score: Mapping[str, Any] = metrics[name] if name else {}
    complete = record["status"] == "complete"
    return {
        "cell": record["cell"],
        "label": label,
        **{key: str(choices[key]) for key in ("task", "model", "method", "budget")},
        "seed": choices["seed"],
        "setting": group["setting"],
        "status": record["status"],
        "error": record["error"],
        "metric": name,
        "value": score.get("value"),
        "se": score.get("stderr"),
        "n": score.get("n"),
        **{cost: read(record) if complete else None for cost, read in COSTS.items()},
    }


def _calibration(group: Group) -> list[dict[str, Any]]:
    """Return what is known of the calibration of each run that had one."""
    rows = []
    for row in group.grid.rows:
        for record in row.records:
            memory = memory_of(record)
            known = {name: memory[name] for name in CALIBRATION if isinstance(memory.get(name), int | float)}
            if known:
                said = {"label": row.label, "method": row.method, "budget": row.budget}
                place = {"cell": record["cell"], "seed": record["choices"]["seed"]}
                rows.append({**said, **place, **known, "prepare_s": record["timing"]["prepare_s"]})
    return rows
