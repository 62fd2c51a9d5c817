"""Grids that are no plain product: lines of overrides, each a product of its own, one after the other.

A preset in `conf/experiment/` writes them as `hydra.sweeper.grid`, with `override /hydra/sweeper: grid` among
its defaults; what `hydra.sweeper.params` sets holds for every line, and the command line replaces both.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

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
