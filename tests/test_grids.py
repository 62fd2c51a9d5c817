"""Lines of a grid: products one after the other, where the later word counts."""

from __future__ import annotations

import pytest

from kvexp import commandline, grids
from kvexp.errors import UserError


def cells(params: dict[str, object], lines: list[str], written: list[str]) -> list[list[str]]:
    return grids.cells(commandline.parse, params, lines, written)


def test_lines_are_products_of_their_own() -> None:
    assert cells({"model": "m"}, ["method=a budget=1,2", "method=b"], []) == [
        ["model=m", "method=a", "budget=1"],
        ["model=m", "method=a", "budget=2"],
        ["model=m", "method=b"],
    ]


def test_a_line_replaces_what_is_shared_and_the_command_line_both() -> None:
    made = cells({"limit": "5", "seed": "0,1"}, ["method=a limit=3", "method=b"], ["seed=7", "budget=1,2"])
    assert [["limit=3", "seed=7", "method=a", "budget=1"], ["limit=5", "seed=7", "method=b", "budget=2"]] == [
        made[0],
        made[3],
    ]


def test_equal_cells_are_run_once_and_quotes_hold_a_value_together() -> None:
    assert cells({}, ["method=a,b", "method=b"], []) == [["method=a"], ["method=b"]]
    assert cells({}, ["x={name:k,bits:2},{name:o}"], []) == [["x={name:k,bits:2}"], ["x={name:o}"]]
    assert cells({}, [], ["seed=0,1"]) == [["seed=0"], ["seed=1"]]


def test_cells_are_listed_by_what_tells_them_apart() -> None:
    made = cells({"limit": "5"}, ["method=a budget=1,2", "x={y:1}"], [])
    assert grids.shared(made) == ["limit=5"]
    assert list(grids.listed(made)) == [
        "# the first of 3 cells of a grid; all have limit=5",
        "# 1  method=a budget=1",
        "# 2  method=a budget=2",
        "# 3  'x={y:1}'",
    ]
    alone = list(grids.listed([["a=1"], ["b=1"]]))
    assert alone == ["# the first of 2 cells of a grid", "# 1  a=1", "# 2  b=1"]


def test_a_mistake_in_one_cell_of_several_names_it() -> None:
    for grid, told in (([["s=1", "a=1"], ["s=1", "a=2"]], "in the cell a=1: no"), ([["s=1", "a=1"]], "no")):
        with pytest.raises(UserError) as caught, grids.named(grid[0], grid):
            raise UserError("no")
        assert str(caught.value) == told


def test_keys_are_those_of_every_line() -> None:
    found = grids.keys(commandline.parse, {"seed": "0,1"}, ["method=a,b method.x=1", "+task.n=2"])
    assert found == {"seed", "method", "method.x", "task.n"}


def test_a_line_that_cannot_be_read_is_one_sentence() -> None:
    with pytest.raises(UserError, match="neither an option nor key=value"):
        cells({}, ["method"], [])
