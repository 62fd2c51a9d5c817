"""The papers' numbers, read from `papers.yaml` and checked: one entry for each number.

`paper` and `table` name the preset that makes the same grid (`experiment=asm/table2`); `value` is as the
paper prints it, `metric` as our records name it, `budget` as our folders do ("full" where a method ignores
it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

import yaml

FILE = "papers.yaml"
PAPERS = ("asm", "aks", "tri")
_TEXTS = ("paper", "table", "model", "task", "method", "budget", "metric", "setting", "source")


@dataclass(frozen=True)
class PaperNumber:
    """One number of a paper, with the setting it was measured in; `note` tells what to mind about it."""

    paper: str
    table: str
    model: str
    task: str
    method: str
    budget: str
    metric: str
    value: float
    setting: str
    source: str
    note: str | None = None

    @property
    def preset(self) -> str:
        """The experiment that makes the cell of this number."""
        return f"{self.paper}/{self.table}"


@cache
def numbers() -> tuple[PaperNumber, ...]:
    """Return every number in the order of the file."""
    text = resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    return parsed(yaml.safe_load(text))


def parsed(entries: Sequence[Mapping[str, Any]]) -> tuple[PaperNumber, ...]:
    """Return checked entries; raises ValueError that names the first one that is none."""
    known, found = {field.name for field in fields(PaperNumber)}, []
    for place, entry in enumerate(entries, 1):
        if not isinstance(entry, Mapping) or set(entry) != known:
            raise ValueError(f"entry {place} of {FILE} has not the keys {', '.join(sorted(known))}: {entry}")
        wrong = [key for key in _TEXTS if not isinstance(entry[key], str) or not entry[key]]
        wrong += [] if isinstance(entry["value"], int | float) else ["value"]
        wrong += [] if entry["note"] is None or isinstance(entry["note"], str) else ["note"]
        if entry["paper"] not in PAPERS:
            wrong.append("paper")
        if wrong:
            raise ValueError(f"entry {place} of {FILE} has no proper {', '.join(wrong)}: {dict(entry)}")
        found.append(PaperNumber(**entry))
    return tuple(found)
