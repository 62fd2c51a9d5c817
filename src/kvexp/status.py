"""`python -m kvexp.status outputs/`: what became of every cell, from a machine that needs no torch.

complete      there is a result
running       a process holds the cell's lock, on whatever host
failed        the record says why
interrupted   a run began and ended without a record: killed, or out of time
broken        files that cannot be read
missing       part of a planned grid, and never started

Exit codes: 0 everything is complete, 1 something has to be run again, 2 a wrong command line, 3 the rest is
still running.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvexp.ended import ended
from kvexp.errors import UserError
from kvexp.plan import PLANS, Plan, read_plan
from kvexp.report.stored import read_record

State = Literal["complete", "running", "failed", "interrupted", "broken", "missing"]
STATES: tuple[State, ...] = ("complete", "running", "failed", "interrupted", "broken", "missing")
AGAIN = ("failed", "interrupted", "broken", "missing")
DEPTH = 5  # folders of a cell below the output folder: task, model, method, budget, cell
MARKS = ("record.json", "config.yaml", "samples.jsonl", "inputs.json", ".lock")
RESULTS = ("record.json", "samples.jsonl")  # of these marks those that nothing but a cell has
NOT_CELLS = ("store", "wandb", PLANS)


@dataclass(frozen=True)
class Cell:
    """One cell: its folder relative to the output folder, its state, why, and the command that runs it."""

    folder: str
    state: State
    reason: str = ""
    command: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the state of a folder's cells and return the exit code."""
    parser = argparse.ArgumentParser("python -m kvexp.status", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", default="outputs", help="the output folder (default: outputs)")
    parser.add_argument("--grid", metavar="NAME", help="only the cells of one planned grid")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    args = parser.parse_args(argv)
    return ended(lambda: _print(args), "name a folder that can be read")


def _print(args: argparse.Namespace) -> int:
    cells, grids = survey(Path(args.folder), args.grid)
    if args.json:
        print(json.dumps({"cells": [dataclasses.asdict(cell) for cell in cells]}, indent=1))
    else:
        print("\n".join(_lines(cells, grids)))
    states = {cell.state for cell in cells}
    return 1 if states & set(AGAIN) else 3 if "running" in states else 0


def survey(folder: Path, grid: str | None = None) -> tuple[list[Cell], list[Plan]]:
    """Return the cells below an output folder, those that are only planned too, and the plans.

    Raises UserError for a folder or a grid that does not exist, and for a folder that has something in it,
    yet no cell: one of a task, say, or of several outputs.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: name the output_dir of the runs, such as outputs/")
    plans, damaged = _plans(folder / PLANS)
    if grid is not None:
        plans = [plan for plan in plans if plan.name == grid]
        damaged = []
        if not plans:
            raise UserError(f"there is no grid {grid} in {folder / PLANS}: leave out --grid to list them")
    planned = {cell.folder: cell.command for plan in plans for cell in plan.cells}
    started = {str(path.relative_to(folder)): path for path in _cell_folders(folder)}
    names = sorted({**planned, **({} if grid is not None else started)})
    cells = [_look(folder, name, planned.get(name, "")) for name in names]
    if not cells and not damaged and any(folder.iterdir()):
        raise UserError(f"there are no cells of an output_dir in {folder}: name {_output_near(folder)}")
    return [*cells, *damaged], plans


def _plans(folder: Path) -> tuple[list[Plan], list[Cell]]:
    plans, damaged = [], []
    for path in sorted(folder.glob("*.json")):
        try:
            plans.append(read_plan(path))
        except UserError as error:
            damaged.append(Cell(f"{PLANS}/{path.name}", "broken", str(error)))
    return plans, damaged


def _cell_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders of cells, without walking into stores, logs and what was set aside."""
    for where, below, files in os.walk(folder):
        depth = len(Path(where).relative_to(folder).parts)
        if depth < DEPTH and any(mark in files for mark in RESULTS):
            below.clear()  # a cell at another depth: what lies in it was set aside
        elif depth >= DEPTH:
            below.clear()
            if any(mark in files for mark in MARKS):
                yield Path(where)
        else:
            below[:] = sorted(name for name in below if name not in NOT_CELLS and not name.startswith("."))


def _output_near(folder: Path) -> str:
    """Return in words the output_dir whose cells lie below `folder` or hold it, as far as one is found."""
    for where, below, files in os.walk(folder):
        below[:] = sorted(name for name in below if name not in NOT_CELLS and not name.startswith("."))
        if any(mark in files for mark in RESULTS):
            parents = Path(where).absolute().parents
            if len(parents) >= DEPTH:
                return f"the output_dir of the runs, {os.path.relpath(parents[DEPTH - 1])}"
    return "the output_dir of the runs, such as outputs"


def _look(output: Path, name: str, planned: str) -> Cell:
    folder = output / name
    command = _at(output, planned or _written_command(folder))
    if _is_held(folder / ".lock"):
        return Cell(name, "running", _progress(folder, _holder(folder)), command)
    record = folder / "record.json"
    if not record.exists():
        if any((folder / mark).exists() for mark in MARKS):
            return Cell(name, "interrupted", _progress(folder, "ended without a record"), command)
        return Cell(name, "missing", "never started", command)
    try:
        content = read_record(record)
    except (OSError, ValueError) as error:
        anew = f"{command} resume=false" if command else ""
        return Cell(name, "broken", f"record.json cannot be read: {error}", anew)
    command = command or _at(output, str(content["provenance"]["command"] or ""))
    if content["status"] == "complete":
        return Cell(name, "complete", "", command)
    return Cell(name, "failed", str(content["error"]), command)


def _is_held(lock: Path) -> bool:
    """Whether a process holds the lock: the kernel says so, whatever stands in the file."""
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks, on which no run can hold one
        return False
    finally:
        os.close(descriptor)
    return False


def _holder(folder: Path) -> str:
    try:
        holder: Any = json.loads((folder / ".lock").read_bytes())
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process"


def _progress(folder: Path, said: str) -> str:
    files = filter(
        Path.is_file, folder.glob("samples*.jsonl")
    )  # while several ranks answer, each has one of its own
    samples = sum(path.read_bytes().count(b"\n") for path in files)
    return f"{said}, {samples} samples" if samples else said


def _written_command(folder: Path) -> str:
    """Return the command in the first line of config.yaml, or nothing."""
    try:
        with open(folder / "config.yaml", encoding="utf-8", errors="replace") as file:
            first = file.readline()
    except OSError:
        return ""
    return first.lstrip("# ").strip() if first.startswith("# python ") else ""


def _at(output: Path, command: str) -> str:
    """Return `command` so that it writes to this output folder, from wherever it is typed."""
    try:
        words = shlex.split(command)
    except ValueError:
        return command
    if not words:
        return ""
    folders = [word.partition("=")[2] for word in words if word.startswith("output_dir=")]
    if Path(folders[-1] if folders else "outputs").expanduser().absolute() == output.absolute():
        return command
    return shlex.join(
        [*(w for w in words if not w.startswith("output_dir=")), f"output_dir={output.absolute()}"]
    )


def _lines(cells: Sequence[Cell], grids: Sequence[Plan]) -> Iterator[str]:
    yield f"{len(cells)} cells: {_counts(cells)}"
    by_folder = {cell.folder: cell for cell in cells}
    for plan in grids:
        yield f"grid {plan.name}: {_counts([by_folder[cell.folder] for cell in plan.cells])}  {plan.command}"
    for cell in cells:
        if cell.state == "complete":
            continue
        yield ""
        yield f"{cell.state}  {cell.folder}" + (f"  {' '.join(cell.reason.split())}" if cell.reason else "")
        if cell.state != "running" and cell.command:
            yield f"    {cell.command}"


def _counts(cells: Sequence[Cell]) -> str:
    counted = Counter(cell.state for cell in cells)
    return ", ".join(f"{counted[state]} {state}" for state in STATES if counted[state]) or "none"


if __name__ == "__main__":
    sys.exit(main())
