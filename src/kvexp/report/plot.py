"""A picture of a grid: accuracy with its standard error over what each method stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvexp.report.colours import MARKERS, SHAPES, look, shapes
from kvexp.report.figures import pyplot, saved
from kvexp.report.grid import grids

METRICS = (("accuracy_calibrated", "calibrated accuracy"), ("accuracy", "raw accuracy"))


def storage_plot(records: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw the records of one task and model, and return the path of the PNG.

    The horizontal axis is storage in KV-token equivalents (bytes held over the bytes of one token's rows).
    Needs matplotlib, of the extra `kvexp[report]`.
    """
    grid = grids(records)[0]
    marks = shapes([{"label": row.label, "method": row.method} for row in grid.rows])
    figure, axes = pyplot().subplots(1, len(METRICS), figsize=(11, 4.6), sharex=True, sharey=True)
    for axis, (name, title) in zip(axes, METRICS, strict=True):
        for row in grid.rows:
            if not row.records:
                continue
            found = [record["metrics"][name] for record in row.records]
            stored = [record["cache"]["kv_token_equivalents"] for record in row.records]
            value = sum(metric["value"] for metric in found) / len(found)
            error = sum((metric["stderr"] or 0) ** 2 for metric in found) ** 0.5 / len(found)
            axis.errorbar(
                sum(stored) / len(stored),
                value,
                yerr=error,
                fmt=MARKERS[SHAPES.index(marks[row.label])],
                color=look(row.method)[0][0],
                capsize=4,
                markersize=8,
                label=row.label,
            )
        axis.set_title(title)
        axis.set_xlabel("storage, KV-token equivalents")
        axis.grid(alpha=0.3)
        axis.set_ylim(0, 1)
    axes[0].set_ylabel("accuracy ± standard error")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(f"{grid.task}, {grid.model}")
    return saved(figure, path, bottom=0.14)
