"""What every picture needs: matplotlib that draws into files, and a file that is written and closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvexp.errors import UserError


def pyplot() -> Any:
    """Return matplotlib's pyplot, drawing into files; UserError where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError(
            "plots need matplotlib, which is not installed: pip install 'kvexp[report]', or read the numbers"
            " in the JSON and CSV files"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as found

    return found


def saved(figure: Any, path: Path, bottom: float = 0.0, pdf: bool = False) -> Path:
    """Write a figure as PNG (and as PDF beside it) and close it.

    `bottom` is the share of its height that a legend below takes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout(rect=(0, bottom, 1, 1))
    figure.savefig(path, dpi=150)
    if pdf:
        figure.savefig(path.with_suffix(".pdf"), metadata={"CreationDate": None})
    pyplot().close(figure)
    return path
