"""The plan of a grid: which cells a multirun is to run, so that one that never started is known as missing.

A plan is one small file, `<output_dir>/plans/<name>.json`, named by a hash of its cells: the same grid
started again replaces its own plan and no other. Removing the file forgets the grid and touches no result.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvexp.cell import cell_hash
from kvexp.errors import UserError
from kvexp.files import check_writable, write_atomic

if TYPE_CHECKING:
    from kvexp.schema import Settings

PLANS = "plans"


@dataclass(frozen=True)
class Planned:
    """One cell of a plan: its folder relative to the output folder, and the command that runs it alone."""

    folder: str
    command: str


@dataclass(frozen=True)
class Plan:
    """A grid as it was started: the command of the whole, and its cells in order."""

    name: str
    command: str
    cells: tuple[Planned, ...]


def write_plans(command: str, cells: Sequence[Settings]) -> list[Path]:
    """Write the plan of a grid in each output folder that it writes to; an OSError names the folder."""
    folders = dict.fromkeys(cell.output_dir for cell in cells)
    for folder in folders:
        check_writable(folder)
    return [write_plan(command, [cell for cell in cells if cell.output_dir == one]) for one in folders]


def write_plan(command: str, cells: Sequence[Settings]) -> Path:
    """Write the plan of a grid, which `command` starts, and return its path."""
    output = cells[0].output_dir
    planned = {str(cell.run_dir.relative_to(output)): cell.command for cell in cells}
    name = cell_hash({"cells": sorted(planned)})
    entries = [{"folder": folder, "command": words} for folder, words in planned.items()]
    path = output / PLANS / f"{name}.json"
    write_atomic(path, (json.dumps({"command": command, "cells": entries}, indent=1) + "\n").encode())
    return path


def read_plan(path: Path) -> Plan:
    """Return a plan. Raises UserError when the file is none."""
    try:
        node: Any = json.loads(path.read_bytes())
        cells = tuple(Planned(_text(cell["folder"]), _text(cell["command"])) for cell in node["cells"])
        return Plan(path.stem, _text(node["command"]), cells)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is no plan of a grid: remove it, and start the grid again") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value
