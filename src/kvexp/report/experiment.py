"""The runs of one experiment preset: those that were started by it, and those that equal one of its cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvexp.report.items import Record

CHOICES = ("model", "method", "task", "budget", "seed")


def selected(name: str, records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """Return the records of `experiment=name`, and in words the cells that no run has the choices of.

    A run with the preset's choices under other settings (`limit=20`) counts as a run of its cell when it says
    that it was started by the preset. Raises UserError when there is no such preset.
    """
    cells = _cells(name)
    hashes = {cell.cell for cell in cells}
    kept = [r for r in records if r["cell"] in hashes or r["choices"].get("experiment") == name]
    had = {tuple(str(record["choices"][key]) for key in CHOICES) for record in kept}
    missing = dict.fromkeys(
        " ".join(f"{key}={value}" for key, value in zip(CHOICES, choices, strict=True))
        for cell in cells
        if (choices := _choices(cell)) not in had
    )
    return kept, list(missing)


def _cells(name: str) -> list[Any]:
    """Return the settings of a preset's cells; nothing is run or fetched."""
    from kvexp import commandline, compose, schema

    args = commandline.read(["--multirun", *commandline.clean([f"experiment={name}"])])
    with compose.opened(args) as composer:
        _, jobs = composer.jobs()
        return [schema.validate(job.config, job.config.hydra) for job in jobs]


def _choices(cell: Any) -> tuple[str, ...]:
    known = {**cell.choices, "budget": cell.budget.rows or "full", "seed": cell.seed}
    return tuple(str(known[key]) for key in CHOICES)
