"""Presets: every cell of each is a valid run, the grids are those of the papers, and small ones run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import presets_of
from kvexp import helptext
from kvexp.cli import settings_of
from kvexp.report.paper_numbers import numbers
from kvexp.run import run
from kvexp.schema import Settings

PAPER = tuple(name for name in presets_of.PRESETS if not name.endswith("_small"))
SMALL = tuple(name for name in presets_of.PRESETS if name.endswith("_small"))
ASM = {"fig3", "table1", "table2", "table3", "table4", "table5", "table6", "fig4", "fig5"}
AKS = {"locomo", "ama", "quantised", "throughput", "recompute"}
TRI = {*(f"table{n}" for n in "12345abcdefg"), *(f"fig5{n}" for n in "abcd"), "fidelity"}
SUITE = {"icl", "rag", "reasoning", "longbench"}
TINY = ["model=tiny-llama", "model.dtype=float32", "limit=2", "logger=none"]


@pytest.fixture(scope="module")
def compose() -> Iterator[Any]:
    with presets_of.composer() as settings:
        yield settings


@pytest.fixture(scope="module")
def cells(compose: Any) -> Any:
    made: dict[str, list[Settings]] = {}

    def of(name: str) -> list[Settings]:
        if name not in made:
            made[name] = [compose(name, words) for words in presets_of.words_of(name)]
        return made[name]

    return of


def test_every_table_and_figure_has_a_preset_and_a_small_twin() -> None:
    wanted = {"asm": ASM, "aks": AKS, "tri": TRI, "suite": SUITE}
    assert set(PAPER) == {f"{paper}/{table}" for paper, tables in wanted.items() for table in tables}
    assert {f"{name}_small" for name in PAPER} == set(SMALL)


@pytest.mark.parametrize("name", presets_of.PRESETS)
def test_every_cell_is_a_valid_run(name: str, cells: Any) -> None:
    made = cells(name)
    assert len(made) >= 2 and len({cell.cell for cell in made}) >= 2
    assert helptext.describe(presets_of.path_of(name)) == presets_of.first_line(name)
    if name.endswith("_small"):
        assert {cell.model.source for cell in made} == {"embedded"}
    else:
        assert {cell.model.source for cell in made} == {"hub"}


@pytest.mark.parametrize("name", sorted({number.preset for number in numbers()}))
def test_a_grid_has_the_cells_that_the_paper_has_numbers_of(name: str, cells: Any) -> None:
    ours = {
        (cell.choices["model"], cell.choices["task"], cell.choices["method"], str(cell.budget))
        for cell in cells(name)
    }
    theirs = {(n.model, n.task, n.method, n.budget) for n in numbers() if n.preset == name}
    assert theirs <= ours, sorted(theirs - ours)


@pytest.mark.parametrize("name", ["asm/fig3_small", "tri/fig5d_small"])
def test_cells_are_those_that_hydra_makes(name: str, cells: Any) -> None:
    """Hydra's own composition of the whole grid, of which the others are a shorter way."""
    mine, hydra = cells(name), settings_of([f"experiment={name}"])
    assert [cell.cell for cell in mine] == [cell.cell for cell in hydra]
    assert [cell.config for cell in mine] == [cell.config for cell in hydra]


def test_the_command_line_replaces_what_a_line_says() -> None:
    [cell] = settings_of(["experiment=tri/tablee_small", "method.norm=none", "budget=128"])
    assert str(cell.budget) == "128" and cell.method.norm == "none"


def test_a_part_that_the_paper_counts_is_named() -> None:
    """AMA-Bench and RULER by groups, searches by steps: the metric is the one that a record has."""
    for number in numbers():
        base = number.metric.split(" [")[0]
        assert base in METRICS, number


METRICS = ("accuracy", "f1", "judge", "average", "score", "match", "stack_match", "speedup", "tokens_per_s")
METRICS += ("concentrated_heads",)


def tiny(name: str, folder: Path, place: int, cell: Settings) -> dict[str, Any]:
    """Run one cell of a preset on a tiny model, and return its record."""
    fewer = "tokens=2000" if cell.calibration.name == "text" else "n=8"
    more = [*TINY, f"calibration.{fewer}", f"output_dir={folder}"]
    if getattr(cell.task, "prompt", "plain") == "chat":
        more.append("task.prompt=plain")  # bytes have no chat template
    if cell.choices["task"] == "ruler":
        more.append("task.length=8192")  # of bytes
    replaced = {word.partition("=")[0] for word in more}
    words = [word for word in presets_of.words_of(name)[place] if word.partition("=")[0] not in replaced]
    [settings] = settings_of(["hydra.mode=RUN", f"experiment={name}", *words, *more])
    return run(settings)


@pytest.mark.parametrize(("name", "place"), [("tri/fig5d_small", 1), ("tri/tablef_small", 0)])
def test_a_cell_of_a_small_preset_runs(name: str, place: int, cells: Any, tmp_path: Path) -> None:
    assert tiny(name, tmp_path, place, cells(name)[place])["status"] == "complete"


@pytest.mark.slow
@pytest.mark.skipif("KVEXP_DATA_DIR" not in os.environ, reason="KVEXP_DATA_DIR is not set")
@pytest.mark.parametrize("name", SMALL)
def test_a_cell_of_every_small_preset_runs(name: str, cells: Any, tmp_path: Path) -> None:
    """The last one: presets begin with their baselines."""
    assert tiny(name, tmp_path, -1, cells(name)[-1])["status"] == "complete"
