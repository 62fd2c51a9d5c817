"""What a figure shows of the steps of one row: those of one batch, few enough for a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvexp.report.items import Record
from kvexp.report.stored import parse

POINTS = 512  # of one line; where a batch has more steps, a point stands for several


def latency_of(records: Sequence[Record]) -> dict[str, Any] | None:
    """Return the longest traced batch of runs that differ in the seed, of equals the latest; None without.

    The first batch of a run warms the machine up, so of equals it is shown last. `ms`: for each `every` steps
    the longest; `pruned`: the points that hold a step at which rows left.
    """
    found = [batch for record in records for batch in _batches(record)]
    if not found:
        return None
    longest = max(reversed(found), key=lambda batch: len(batch["step_ms"]))
    steps = longest["step_ms"]
    every = -(-len(steps) // POINTS)
    return {
        "every": every,
        "ms": [max(steps[at : at + every]) for at in range(0, len(steps), every)],
        "pruned": sorted({number // every for number in longest["pruned"]}),
    }


def _batches(record: Record) -> list[dict[str, Any]]:
    """Return the batches of a run's latency.json that can be drawn, [] where there is none."""
    folder = record.get("folder")
    if folder is None:
        return []
    try:
        found = parse((Path(folder) / "latency.json").read_bytes())
    except (OSError, ValueError):
        return []
    batches = found.get("batches") if isinstance(found, Mapping) else None
    return [batch for batch in batches if _sound(batch)] if isinstance(batches, list) else []


def _sound(batch: Any) -> bool:
    """Whether a batch has steps of positive length, and names as pruned none but those."""
    steps, pruned = (
        batch.get(name) if isinstance(batch, Mapping) else None for name in ("step_ms", "pruned")
    )
    if not isinstance(steps, list) or not steps or not isinstance(pruned, list):
        return False
    plain = all(type(ms) in (int, float) and 0 < ms < float("inf") for ms in steps)
    return plain and all(type(number) is int and 0 <= number < len(steps) for number in pruned)
