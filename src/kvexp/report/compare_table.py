"""The table of two sets of runs side by side, in the terminal."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvexp.report.significance import LEVEL

WIDTH, ROOM = 110, 250  # of what is said, and more than any row takes: no figure is cut off
NAMED = 6  # as many cells without a partner are named


def table(found: Mapping[str, Any]) -> str:
    """Return the text: what differs, a row for each pair of cells, what has no partner."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=ROOM, color_system=None)
    console.print(Text(f"A: {found['a']}\nB: {found['b']}"))
    for key, (first, second) in found["differing"].items():
        console.print(Text(f"{key}: {first} in A, {second} in B"))
    console.print()
    console.print(_rows(found["rows"]))
    console.print(
        Text(
            "B - A on the same items; ± and interval: bootstrap over items, the second ± over seeds; p:"
            " exact, two-sided, of wins against losses, after Holm's correction over the rows of one score"
            f" (of several seeds, over their means). Nothing is claimed above the {LEVEL:.0%} level."
        ),
        width=WIDTH,
    )
    for side in ("a", "b"):
        alone = found[f"only_{side}"]
        if alone:
            more = f" and {len(alone) - NAMED} more" if len(alone) > NAMED else ""
            named = f"without a partner, in {side.upper()}: {', '.join(alone[:NAMED])}{more}"
            console.print(Text(named), width=WIDTH)
        for one in found[f"unsound_{side}"]:
            left_out = f"left out, in {side.upper()}: {one['folder']}: {one['reason']}"
            console.print(Text(left_out), width=WIDTH)
    return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip().splitlines()) + "\n"


def _rows(rows: Sequence[Mapping[str, Any]]) -> Table:
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    made.add_column("cells", overflow="fold", min_width=18, max_width=40)
    made.add_column("score", overflow="fold", min_width=10, max_width=24)
    for heading in ("budget", "seeds", "items", "A", "B", "B - A", "95 % interval", "p", "B is"):
        made.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        errors = [error for error in (row["se"], row["se_seeds"]) if error is not None]
        made.add_row(
            row["cells"],
            row["metric"].replace("_", " "),
            row["budget"],
            ",".join(map(str, row["seeds"])),
            str(row["items"]),
            f"{row['a']:.3f}",
            f"{row['b']:.3f}",
            " ".join([f"{row['value']:+.3f}", *(f"±{error:.3f}" for error in errors)]),
            f"{row['low']:+.3f} {row['high']:+.3f}",
            _p(row.get("holm")),
            row.get("verdict", ""),
        )
    return made


def _p(value: float | None) -> str:
    if value is None:
        return ""
    return "< .001" if value < 0.001 else f"{value:.3f}"
