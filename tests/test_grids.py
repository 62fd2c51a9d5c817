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


def test_a_line_that_cannot_be_read_is_one_sentence() -> None:
    with pytest.raises(UserError, match="neither an option nor key=value"):
        cells({}, ["method"], [])
