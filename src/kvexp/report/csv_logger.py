"""One CSV file for a whole grid: `<output_dir>/results.csv`, a row for each cell."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvexp.errors import UserError
from kvexp.files import file_lock, write_atomic
from kvexp.report.loggers import Job, Outcome, flatten, summary

FIRST = ("cell", "status", "error", "model", "method", "task", "budget", "seed")


class CsvLogger:
    """Writes the row of a cell when its run ends; a cell that runs again replaces its row.

    Columns keep their places once they are written, new ones come at the end. The file is replaced whole
    under a lock, so that a killed writer leaves no half row and simultaneous runs lose none.
    """

    def __init__(self) -> None:
        self._path = Path()
        self._row: dict[str, Any] = {}

    def start(self, job: Job) -> None:
        """Note the cell and its choices."""
        self._path = job.output_dir / "results.csv"
        self._row = {"cell": job.cell, "status": "", "error": "", **flatten(job.choices)}
        self._row["folder"] = str(job.folder)

    def metrics(self, record: Mapping[str, Any]) -> None:
        """Note the result; a metric's column has its plain name, so that all tasks share it."""
        task = self._row["task"]
        for key, value in summary(record).items():
            self._row.setdefault(key.removeprefix(f"{task}/"), value)

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write nothing: the samples stand in the run's own folder."""

    def finish(self, status: Outcome, error: str | None = None) -> None:
        """Write the row. Raises UserError when results.csv is not a file of this logger."""
        self._row.update(status=status, error=error or "")
        with file_lock(self._path.parent / ".results.lock", say=lambda _: None):
            columns, rows = _read(self._path)
            columns += [name for name in _in_order(self._row) if name not in columns]
            text = {name: "" if value is None else str(value) for name, value in self._row.items()}
            places = [index for index, row in enumerate(rows) if row["cell"] == self._row["cell"]]
            if places:
                rows[places[0]] = text
            else:
                rows.append(text)
            write_atomic(self._path, _dump(columns, rows))


def _in_order(row: Mapping[str, Any]) -> list[str]:
    return [*FIRST, *(name for name in row if name not in FIRST)]


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    if not path.exists():
        return [], []
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file, restval="")
        columns = list(reader.fieldnames or [])
        if "cell" not in columns:
            raise UserError(f"{path} has no column 'cell', so it is left as it is: move it away to log to it")
        rows = list(reader)
    if any(None in row for row in rows):
        raise UserError(f"{path} has a row longer than its header, so it is left as it is: move it away")
    return columns, rows


def _dump(columns: list[str], rows: list[dict[str, str]]) -> bytes:
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue().encode("utf-8")
