"""results.csv: one row a cell, columns that stay, many writers."""

from __future__ import annotations

import csv
import multiprocessing
from pathlib import Path

import pytest

from kvexp.errors import UserError
from kvexp.report.csv_logger import CsvLogger
from kvexp.report.loggers import Job
from kvexp.report.record import metric


def log(folder: Path, record: dict, cell: str, error: str | None = None) -> None:
    logger = CsvLogger()
    logger.start(Job(cell, folder / cell, folder, record["choices"]))
    if not error:
        logger.metrics(record)
    logger.finish("failed" if error else "complete", error)


def read(folder: Path) -> tuple[list[str], list[dict[str, str]]]:
    with open(folder / "results.csv", newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    return list(reader.fieldnames), rows


def test_columns_start_with_what_identifies_a_row(tmp_path, make_record):
    log(tmp_path, make_record(accuracy=0.5, stderr=0.125), "c1")
    columns, (row,) = read(tmp_path)
    assert columns[:8] == ["cell", "status", "error", "model", "method", "task", "budget", "seed"]
    assert (row["cell"], row["status"], row["error"]) == ("c1", "complete", "")
    assert (row["accuracy"], row["accuracy_stderr"], row["budget"]) == ("0.5", "0.125", "1024")
    assert (row["cache/evicted"], row["folder"]) == ("3072", str(tmp_path / "c1"))


def test_new_columns_come_last_and_old_rows_stay(tmp_path, make_record):
    log(tmp_path, make_record(), "c1")
    before, _ = read(tmp_path)
    wider = make_record("full", "full", task="qa")
    wider["metrics"]["f1"] = metric(0.75, 0.1, 8)
    log(tmp_path, wider, "c2")
    log(tmp_path, make_record(seed=1), "c3")
    columns, rows = read(tmp_path)
    assert columns == [*before, "f1", "f1_stderr"]
    assert [(row["cell"], row["task"], row["accuracy"], row["f1"]) for row in rows] == [
        ("c1", "intents", "0.5", ""),
        ("c2", "qa", "0.5", "0.75"),
        ("c3", "intents", "0.5", ""),
    ]
    assert rows[1]["budget"] == "full"


def test_a_cell_that_runs_again_replaces_its_row(tmp_path, make_record):
    log(tmp_path, make_record(), "c1", error='no "memory", sorry')
    log(tmp_path, make_record(), "c2")
    assert read(tmp_path)[1][0]["error"] == 'no "memory", sorry'
    log(tmp_path, make_record(accuracy=0.25), "c1")
    rows = read(tmp_path)[1]
    assert [(row["cell"], row["status"], row["error"], row["accuracy"]) for row in rows] == [
        ("c1", "complete", "", "0.25"),
        ("c2", "complete", "", "0.5"),
    ]


@pytest.mark.parametrize("text", ["name;value\na;1\n", "cell,seed\nc1,0,7\n"])
def test_a_file_of_another_kind_is_left_as_it_is(tmp_path, make_record, text):
    (tmp_path / "results.csv").write_text(text)
    with pytest.raises(UserError, match="left as it is"):
        log(tmp_path, make_record(), "c1")
    assert (tmp_path / "results.csv").read_text() == text


def test_simultaneous_cells_lose_no_row(tmp_path, make_record):
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=log, args=(tmp_path, make_record(f"m{n}", seed=n), f"c{n}")) for n in range(8)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    assert [writer.exitcode for writer in writers] == [0] * 8
    assert sorted(row["cell"] for row in read(tmp_path)[1]) == [f"c{n}" for n in range(8)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".results.lock", "results.csv"]
