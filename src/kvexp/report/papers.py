"""Numbers that papers report, beside ours: those of a group's task, or of one table of an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvexp.report.paper_numbers import PaperNumber, numbers

PER_CENT = 100
NOTES = {"amem": "A-MEM", "licomemory": "LiCoMemory"}  # as settings of the papers begin
SMALL = "_small"  # the twin of a preset, for a small model


def beside(group: Mapping[str, Any], experiment: str | None = None) -> list[dict[str, Any]]:
    """Return the papers' numbers for a group's task, with ours where a row has the same method and budget.

    Numbers on the notes of one memory stand beside runs on these alone. With an experiment such as
    "asm/table2" (or its small twin) only those of its table, where there are any. Ours are shown per cent
    where the paper prints per cent.
    """
    preset = (experiment or "").removesuffix(SMALL)
    mine = [entry for entry in numbers() if entry.task == group["task"] and _same_notes(entry, group)]
    named = [entry for entry in mine if entry.preset == preset]
    return [{**asdict(entry), "ours": _ours(entry, group)} for entry in named or mine]


def _same_notes(entry: PaperNumber, group: Mapping[str, Any]) -> bool:
    theirs = next((name for name, word in NOTES.items() if entry.setting.startswith(word)), None)
    return theirs is None or group["notes"] in (theirs, None)


def _ours(entry: PaperNumber, group: Mapping[str, Any]) -> dict[str, Any] | None:
    for row in group["rows"]:
        found = row["metrics"].get(entry.metric)
        if row["method"] == entry.method and row["budget"] in (entry.budget, "full") and found:
            per_cent = entry.value > 1 >= found["value"] >= 0
            errors = ("value", "se", "se_seeds", "low", "high")
            return {
                "label": row["label"],
                **found,
                **{name: _times(found[name], per_cent) for name in errors},
            }
    return None


def _times(value: float | None, per_cent: bool) -> float | None:
    return value * PER_CENT if per_cent and value is not None else value
