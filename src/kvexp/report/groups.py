"""What may be compared: runs that asked the same things of the same model in the same setting.

A setting is every choice but the method's own, the budget and the seed. Runs of one task and model under two
settings (two contexts, two number types) stand in two groups, each named by what tells it from the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvexp.report.choices import differing, short_names
from kvexp.report.grid import Grid, Row, grids, setting_of
from kvexp.report.items import Record

FIRST = ("full", "full_recompute", "no_context", "truncate")


@dataclass(frozen=True)
class Group:
    """One grid of a task and model, and the words that tell its setting from that of its neighbours."""

    grid: Grid
    words: str

    @property
    def title(self) -> str:
        """The name of the group for people."""
        return " · ".join(part for part in (self.grid.task, self.grid.model, self.words) if part)


def groups(records: Sequence[Record]) -> list[Group]:
    """Return the groups of records, those of one task together, rows in a fixed order."""
    by_setting: dict[tuple[str, str, str], list[Record]] = {}
    for record in sorted(records, key=_place):
        choices = record["choices"]
        key = choices["task"], choices["model"], json.dumps(setting_of(record), sort_keys=True, default=str)
        by_setting.setdefault(key, []).append(record)
    found = []
    for (task, model, setting), members in by_setting.items():
        peers = [json.loads(other) for t, m, other in by_setting if (t, m) == (task, model)]
        for grid in grids(members):
            rows = tuple(sorted(grid.rows, key=_row_place))
            found.append(Group(replace(grid, rows=rows), _words(json.loads(setting), peers)))
    return found


def _row_place(row: Row) -> tuple[Any, ...]:
    _, _, first, method, rows, _ = _place((row.records or row.failed)[0])
    return first, method, row.label, rows


def _place(record: Record) -> tuple[Any, ...]:
    choices = record["choices"]
    method, budget = choices["method"], choices["budget"]
    first = FIRST.index(method) if method in FIRST else len(FIRST)
    rows = float("inf") if budget == "full" else budget
    return choices["task"], choices["model"], first, method, rows, choices["seed"]


def _words(setting: Mapping[str, Any], peers: Sequence[Mapping[str, Any]]) -> str:
    """Return the settings in which a group differs from its peers, under short names."""
    names = short_names(differing(sorted({key for peer in peers for key in peer}), peers))
    words = [
        name if setting[key] is True else f"{name}={setting[key]}"
        for key, name in names.items()
        if setting.get(key) is not None
    ]
    return " ".join(words) or ("default" if names else "")
