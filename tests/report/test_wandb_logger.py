"""Weights & Biases offline: what a run leaves on the disk, read back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import wandb

from kvexp.report.loggers import Job, make_logger
from kvexp.report.record import metric
from kvexp.report.wandb_logger import default_mode
from wandb_file import read


@pytest.fixture(autouse=True)
def sealed(monkeypatch, tmp_path):
    """No key, no sweep, no settings of the user; the terminal stays quiet."""
    for name in ("API_KEY", "SWEEP_ID", "MODE", "PROJECT", "ENTITY", "RUN_ID", "NAME", "BASE_URL"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_SILENT", "true")


def job(tmp_path: Path, seed: int = 0) -> Job:
    choices = {"method": "asm", "model": "tiny", "task": "intents", "budget": 1024, "seed": seed}
    config = {"method": {"layout": "shared", "whiten": False}, "labels": ["a", "b"], "output_dir": "o"}
    folder = tmp_path / f"cell{seed}"
    folder.mkdir()
    return Job(f"012345678{seed}", folder, tmp_path, choices, config)


def test_a_complete_run(tmp_path, make_record):
    record = make_record("asm", accuracy=0.5, stderr=0.125)
    record["metrics"]["kl"] = metric(0.25, None, 8, higher_is_better=False)
    said: list[str] = []
    logger = make_logger("wandb", say=said.append, project="grid", rank=0)
    logger.start(job(tmp_path))
    logger.metrics(record)
    logger.samples([{"id": "a", "scores": {"accuracy": 1.0}}, {"id": "b", "answer": "é"}])
    logger.finish("complete")
    assert said == []

    found = read(tmp_path / "cell0")
    run = found["run"]
    assert (run.run_id, run.project, run.run_group, run.job_type) == (
        "0123456780",
        "grid",
        "intents/tiny",
        "evaluate",
    )
    assert run.display_name == "asm-intents-b1024-s0"
    assert sorted(run.tags) == ["asm", "intents", "tiny"]
    config = {key: value for key, value in found["config"].items() if key != "_wandb"}
    assert config == {
        "method.layout": "shared",
        "method.whiten": False,
        "labels": ["a", "b"],
        "output_dir": "o",
        "method": "asm",
        "model": "tiny",
        "task": "intents",
        "budget": 1024,
        "seed": 0,
    }
    summary = found["summary"]
    assert (summary["intents/accuracy"], summary["intents/kl"]) == (0.5, 0.25)
    assert (summary["budget"], summary["cache/evicted"], summary["timing/encode_s"]) == (1024, 3072, 2.0)
    assert summary["status"] == "complete" and "error" not in summary
    assert found["history"][0]["intents/accuracy"] == 0.5
    assert found["exit"] == 0
    (table,) = found["tables"]
    assert table["columns"] == ["id", "scores", "answer"]
    assert table["data"] == [["a", '{"accuracy": 1.0}', None], ["b", None, "é"]]


def test_a_failed_run_is_marked_failed(tmp_path):
    logger = make_logger("wandb", rank=0)
    logger.start(job(tmp_path))
    logger.finish("failed", "no memory")
    found = read(tmp_path / "cell0")
    assert found["exit"] == 1
    assert (found["summary"]["status"], found["summary"]["error"]) == ("failed", "no memory")


def test_a_preempted_run_asks_to_be_queued_again(tmp_path):
    logger = make_logger("wandb", rank=0)
    logger.start(job(tmp_path))
    logger.finish("preempted")
    found = read(tmp_path / "cell0")
    assert found["preempting"] and found["exit"] == 1


def test_each_job_of_a_grid_is_a_run_of_its_own(tmp_path, make_record):
    for seed in (0, 1):
        logger = make_logger("wandb", rank=0)
        logger.start(job(tmp_path, seed))
        if seed:  # the first one is never finished
            logger.metrics(make_record("asm", seed=seed))
            logger.finish("complete")
    runs = [read(tmp_path / f"cell{seed}") for seed in (0, 1)]
    assert [found["run"].run_id for found in runs] == ["0123456780", "0123456781"]
    assert [len(found["history"]) for found in runs] == [0, 1]


def test_a_broken_wandb_does_not_end_the_run(tmp_path, monkeypatch, make_record):
    def no_network(**_: object) -> None:
        raise wandb.errors.CommError("cannot reach the server")

    monkeypatch.setattr(wandb, "init", no_network)
    said: list[str] = []
    logger = make_logger("wandb", say=said.append, rank=0)
    logger.start(job(tmp_path))
    logger.metrics(make_record())
    logger.finish("complete")
    assert said == ["WandbLogger failed and is off for the rest of this run: cannot reach the server"]


def test_in_a_sweep_the_agent_decides_project_and_id(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    given: dict = {}
    monkeypatch.setattr(wandb, "init", given.update)
    make_logger("auto", project="grid", entity="me", rank=0).start(job(tmp_path))
    assert (given["project"], given["entity"], given["id"], given["mode"]) == (None, None, None, None)
    assert given["group"] == "intents/tiny"


def test_variables_come_before_knobs(tmp_path, monkeypatch):
    for name, value in (("MODE", "disabled"), ("PROJECT", "theirs"), ("ENTITY", "them")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    given: dict = {}
    monkeypatch.setattr(wandb, "init", given.update)
    make_logger("wandb", project="grid", mode="online", rank=0).start(job(tmp_path))
    assert (given["project"], given["entity"], given["mode"]) == ("theirs", "them", "disabled")


def test_the_mode_is_offline_without_a_key_in_environment_or_netrc(tmp_path, monkeypatch):
    assert default_mode() == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123\n")
    assert default_mode() is None
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:8080")
    assert default_mode() == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "0123")
    assert default_mode() is None


def test_importing_the_loggers_imports_neither_wandb_nor_torch():
    code = "import sys, kvexp.report.wandb_logger, kvexp.report.folder; "
    code += "print({'wandb', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_memory_is_an_artifact(tmp_path, make_record):
    memory = tmp_path / "store/asm-00ff"
    memory.mkdir(parents=True)
    (memory / "memory.safetensors").write_bytes(b"tensors")
    (memory / "manifest.json").write_text("{}")
    (memory / ".lock").write_text("")
    chosen = job(tmp_path)
    pointer = {"folder": str(memory), "built": True, "manifest": {"entries": 64}}
    (chosen.folder / "memory.json").write_text(json.dumps(pointer))
    logger = make_logger("wandb", rank=0)
    logger.start(chosen)
    logger.metrics(make_record("asm"))
    logger.finish("complete")
    (artifact,) = [one for one in read(chosen.folder)["artifacts"] if one.type == "memory"]
    assert artifact.name == "asm-tiny-traces" and "00ff" in artifact.aliases
    assert json.loads(artifact.metadata) == {"entries": 64}
    files = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert set(files) == {"memory.safetensors", "manifest.json"}
    assert files["memory.safetensors"] == memory / "memory.safetensors"  # not copied


def test_no_artifact_where_it_is_not_wanted_or_none_is_there(tmp_path, make_record):
    for seed, knobs in enumerate(({}, {"artifact": False})):
        chosen = job(tmp_path, seed)
        if knobs:
            (chosen.folder / "memory.json").write_text("not read")
        logger = make_logger("wandb", rank=0, **knobs)
        logger.start(chosen)
        logger.metrics(make_record("asm", seed=seed))
        logger.finish("complete")
        found = read(chosen.folder)
        assert not [one for one in found["artifacts"] if one.type == "memory"] and found["exit"] == 0
