"""Numbers that papers report, to stand beside ours: `papers.yaml`, one entry for each number.

An entry has `paper, table, model, task, method, budget, metric, value, setting, source, note`; the value is
as the paper prints it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import yaml

FILE = "papers.yaml"
SHOWN = ("paper", "table", "model", "method", "budget", "metric", "value", "setting", "source", "note")


@functools.cache
def reported() -> Sequence[Mapping[str, Any]]:
    """Return every number, none where the file is absent."""
    file = resources.files(__package__).joinpath(FILE)
    return yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else []


def beside(group: Mapping[str, Any], experiment: str | None = None) -> list[dict[str, Any]]:
    """Return the papers' numbers for a group's task, with ours where a row has the same method and budget.

    With an experiment such as "asm/table2" only those of its table, where there are any.
    """
    mine = [entry for entry in reported() if entry.get("task") == group["task"]]
    named = [entry for entry in mine if _named(entry) == experiment]
    return [
        {**{key: entry.get(key) for key in SHOWN}, "ours": _ours(entry, group)} for entry in named or mine
    ]


def _named(entry: Mapping[str, Any]) -> str:
    return f"{entry.get('paper')}/{entry.get('table')}".lower().replace(" ", "")


def _ours(entry: Mapping[str, Any], group: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for row in group["rows"]:
        same_budget = row["budget"] == "full" or str(entry.get("budget")) == row["budget"]
        if row["method"] == entry.get("method") and same_budget:
            return row["metrics"].get(entry.get("metric"))
    return None
