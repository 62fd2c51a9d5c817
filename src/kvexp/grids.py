"""Grids that are no plain product: lines of overrides, each a product of its own, one after the other.

A preset in `conf/experiment/` writes them as `hydra.sweeper.grid`, with `override /hydra/sweeper: grid` among
its defaults; what `hydra.sweeper.params` sets holds for every line, and the command line replaces both.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvexp.errors import UserError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

Parse = Callable[[list[str]], "list[Override]"]


def cells(
    parse: Parse, params: Mapping[str, object], lines: Sequence[str], written: Sequence[str]
) -> list[list[str]]:
    """Return the overrides of every cell, each cell once, in the order of the lines.

    `parse` reads overrides; of two that set the same key the later counts: a line's comes after `params`, and
    `written`, the command line, last. No line stands for one of no words.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    shared = [f"{key}={value}" for key, value in params.items()]
    found: dict[tuple[str, ...], None] = {}
    for line in lines or [""]:
        parsed = parse([*shared, *shlex.split(line), *written])
        for cell in BasicSweeper.split_arguments(parsed, None)[0]:
            found.setdefault(tuple(cell))
    return [list(cell) for cell in found]


def keys(parse: Parse, params: Mapping[str, object], lines: Sequence[str]) -> set[str]:
    """Return every key and group that a preset's lines or `params` set."""
    found = (item.key_or_group for line in lines for item in parse(shlex.split(line)))
    return {*params, *found}


def shared(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the words that all cells have, in their order."""
    common = set.intersection(*map(set, cells))
    return [word for word in cells[0] if word in common]


def listed(cells: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the cells as comments of a YAML file: what all have, then the words of each."""
    common = shared(cells)
    said = f"; all have {shlex.join(common)}" if common else ""
    yield f"# the first of {len(cells)} cells of a grid{said}"
    width = len(str(len(cells)))
    for number, cell in enumerate(cells, 1):
        yield f"# {number:{width}}  {shlex.join(word for word in cell if word not in common)}".rstrip()


@contextmanager
def named(cell: Sequence[str], cells: Sequence[Sequence[str]]) -> Iterator[None]:
    """Name the cell in a UserError of the block, by its words that other cells do not have."""
    try:
        yield
    except UserError as error:
        if len(cells) == 1:
            raise
        common = shared(cells)
        own = " ".join(word for word in cell if word not in common)
        raise UserError(f"in the cell {own}: {error}") from error
