"""Trackers without an account: what each holds afterwards; skipped where its package is not installed."""

from __future__ import annotations

import json
import sqlite3
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvexp.errors import UserError
from kvexp.report.local_loggers import MlflowLogger, TensorboardLogger, TrackioLogger
from kvexp.report.loggers import Job, make_logger


def job(folder: Path) -> Job:
    choices = {"method": "asm", "model": "tiny", "task": "intents", "budget": 1024, "seed": 0}
    return Job("0123456789", folder / "cell", folder, choices, {"method": {"layout": "shared"}})


@pytest.mark.parametrize("kind", [MlflowLogger, TensorboardLogger, TrackioLogger])
def test_an_absent_package_is_named(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, kind.package, None)
    with pytest.raises(UserError, match=rf"pip install 'kvexp\[{kind.extra}\]'"):
        kind().start(job(tmp_path))


def test_names_are_loggers_that_are_guarded():
    kinds = {"mlflow": MlflowLogger, "tensorboard": TensorboardLogger, "trackio": TrackioLogger}
    for name, kind in kinds.items():
        made = make_logger(name, project="p", entity=None, mode=None, rank=0).inner
        assert isinstance(made, kind) and made.project == "p"


def run(name: str, folder: Path, record: dict | None, error: str | None = None) -> None:
    said: list[str] = []
    logger = make_logger(name, say=said.append, rank=0, project="grid")
    logger.start(job(folder))
    if record:
        logger.metrics(record)
    logger.finish("failed" if error else "complete", error)
    assert said == []


def test_tensorboard(tmp_path, make_record):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run("tensorboard", tmp_path, make_record("asm", accuracy=0.5))
    (folder,) = (tmp_path / "tensorboard/intents/tiny").iterdir()
    assert folder.name == "asm-intents-b1024-s0-0123456789"
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [event.value for event in events.Scalars("intents/accuracy")] == [0.5]
    assert [event.value for event in events.Scalars("cache/evicted")] == [3072]


def test_mlflow(tmp_path, make_record, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run("mlflow", tmp_path, None, "no memory")
    run("mlflow", tmp_path, make_record("asm", accuracy=0.5))  # the same cell goes on
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("grid")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.data.tags["cell"] == "0123456789"
    assert found.data.metrics["intents/accuracy"] == 0.5
    assert found.data.params["method.layout"] == "shared" and found.data.params["budget"] == "1024"


def test_trackio(tmp_path, make_record, monkeypatch):
    if find_spec("trackio") is None:
        pytest.skip("pip install 'kvexp[trackio]'")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run("trackio", tmp_path, make_record("asm", accuracy=0.5))
    (file,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("select run_name, metrics from metrics order by step").fetchall()
    assert {name for name, _ in rows} == {"asm-intents-b1024-s0-0123456789"}
    logged = {key: value for _, text in rows for key, value in json.loads(text).items()}
    assert (logged["intents/accuracy"], logged["failed"]) == (0.5, 0)
