"""The plan of a grid: named by its cells, read back as it was written."""

from __future__ import annotations

import dataclasses
import functools
import json
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.plan import read_plan, write_plan, write_plans
from kvexp.schema import Settings

WORDS = ["model=tiny-llama", "method=full", "seed=0,1"]


@functools.cache
def composed() -> list[Settings]:
    return settings_of(["-m", *WORDS, "limit=2,3"])


def cells(folder: Path, limit: int = 2) -> list[Settings]:
    return [dataclasses.replace(cell, output_dir=folder) for cell in composed() if cell.limit == limit]


def test_a_plan_reads_back(tmp_path: Path) -> None:
    grid = cells(tmp_path)
    path = write_plan("python -m kvexp -m x", [*grid, grid[0]])  # a cell that stands twice is one
    plan = read_plan(path)
    assert path == tmp_path / f"plans/{plan.name}.json" and plan.command == "python -m kvexp -m x"
    assert [tmp_path / cell.folder for cell in plan.cells] == [cell.run_dir for cell in grid]
    assert [cell.command for cell in plan.cells] == [cell.command for cell in grid]


def test_the_same_cells_have_one_plan_and_others_another(tmp_path: Path) -> None:
    first = write_plan("a", cells(tmp_path))
    assert write_plan("b", list(reversed(cells(tmp_path)))) == first
    assert write_plan("c", cells(tmp_path, 3)) != first
    assert len(list((tmp_path / "plans").iterdir())) == 2


def test_each_output_folder_has_a_plan_of_its_own_cells(tmp_path: Path) -> None:
    first, second = (cells(tmp_path / name) for name in "ab")
    paths = write_plans("x", [*first, *second])
    assert [path.parent for path in paths] == [tmp_path / "a/plans", tmp_path / "b/plans"]
    assert [len(read_plan(path).cells) for path in paths] == [2, 2]


def test_a_folder_that_cannot_be_written_is_named_before_any_plan(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("a file")
    with pytest.raises(NotADirectoryError) as caught:
        write_plans("x", [*cells(tmp_path / "b"), *cells(tmp_path / "a")])
    assert caught.value.filename == str(tmp_path / "b") and not (tmp_path / "a").exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"command": 1, "cells": []}), '{"cells": [3]}'])
def test_what_is_no_plan_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UserError, match="is no plan of a grid"):
        read_plan(path)


def test_the_command_of_a_cell_runs_that_cell_alone() -> None:
    grids = [["experiment=intents_grid", "limit=3"]]
    if find_spec("submitit"):
        grids.append(["experiment=intents_grid", "limit=3", "cluster=slurm_array"])
        grids.append(["experiment=asm/fig5_small", "cluster=slurm_array"])
    for words in grids:
        cell = settings_of(words)[1]
        (alone,) = settings_of(shlex.split(cell.command)[3:])
        assert (alone.cell, alone.command) == (cell.cell, cell.command)
