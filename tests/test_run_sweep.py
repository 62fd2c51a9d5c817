"""A cell that is complete already, met by a W&B sweep: the sweep gets its numbers without a second run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cells import cell
from kvexp import model
from kvexp import run as run_module
from kvexp.report.loggers import Guarded, NoLogger


class Noted(NoLogger):
    def __init__(self) -> None:
        self.said: list[Any] = []

    def start(self, job: Any) -> None:
        self.said.append(("start", job.cell))

    def metrics(self, record: Any) -> None:
        self.said.append(("metrics", record["status"]))

    def samples(self, rows: Any) -> None:
        self.said.append(("samples", len(rows)))

    def finish(self, status: str, error: str | None = None) -> None:
        self.said.append(("finish", status))


def test_a_sweep_hears_of_a_complete_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)
    settings = cell(tmp_path, "method=no_context", "task.context_tokens=300", "limit=4")
    run_module.run(settings)
    loggers: list[Noted] = []

    def made(**_: Any) -> Guarded:
        loggers.append(Noted())
        return Guarded(loggers[-1])

    monkeypatch.setattr(run_module, "make_logger", made)
    monkeypatch.setattr(model, "load_once", None)
    run_module.run(settings)
    assert loggers == []
    monkeypatch.setenv("WANDB_SWEEP_ID", "s")
    run_module.run(settings)
    (logger,) = loggers
    assert logger.said == [
        ("start", settings.cell),
        ("metrics", "complete"),
        ("samples", 4),
        ("finish", "complete"),
    ]
