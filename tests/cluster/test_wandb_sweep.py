"""Sweep files: W&B's own engine draws from each, and its agent runs one against a double of the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from wandb_double import Double

from wandb_file import read

SWEEPS = Path(__file__).parents[2] / "scripts/sweeps"
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

TINY = {
    "model": "tiny-llama",
    "task.context_tokens": 300,
    "task.n_labels": 4,
    "task.n_calibration": 4,
    "limit": 4,
    "calibration.n": 12,
}
CELLS = [
    {"method": "truncate", "budget": budget, "seed": seed, **TINY} for budget in (64, 128) for seed in (0, 1)
]


@pytest.fixture
def agent_environment(environment, tmp_path) -> dict[str, str]:
    """A person with a key, and a server on loopback; the runs themselves are logged offline."""
    folders = {f"WANDB_{name}_DIR": str(tmp_path / name.lower()) for name in ("CONFIG", "CACHE", "DATA")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    key = {"WANDB_API_KEY": "0" * 40, "NETRC": str(tmp_path / "netrc"), "WANDB_SILENT": "true"}
    return {**environment, **folders, **key, "PATH": path}


def wandb(words: list[str], folder: Path, environment: dict[str, str]) -> str:
    command = [sys.executable, "-m", "wandb", *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("form", ["${args_no_hyphens}", "${args}"])
def test_an_agent_runs_a_sweep(form: str, agent_environment, tmp_path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text((SWEEPS / "grid.yaml").read_text().replace("${args_no_hyphens}", form))
    runs = CELLS if form == "${args_no_hyphens}" else CELLS[:1]
    with Double(runs, resumed="run0") as server:
        there = {**agent_environment, "WANDB_BASE_URL": server.url}
        wandb(["sweep", "--project", "kvexp", "--entity", "me", "sweep.yaml"], tmp_path, there)
        assert yaml.safe_load(server.config)["command"][-1] == form
        wandb(["agent", "me/kvexp/sweep1"], tmp_path, {**there, "WANDB_MODE": "offline"})
    records = sorted((tmp_path / "outputs").rglob("record.json"))
    assert len(records) == len(runs)
    files = []
    for path in records:
        record, found = json.loads(path.read_text()), read(path.parent)
        assert record["status"] == found["summary"]["status"] == "complete" and found["exit"] == 0
        for name, metric in record["metrics"].items():
            assert found["summary"][f"intents/{name}"] == metric["value"]
        for section in ("cache", "timing"):
            for name, value in record[section].items():
                if isinstance(value, int | float):
                    assert found["summary"][f"{section}/{name}"] == value
        assert found["run"].sweep_id == "sweep1"
        (table,) = found["tables"]
        assert len(table["data"]) == 4
        choices = {key: record["choices"][key] for key in ("method", "budget", "seed")}
        assert choices == {key: found["config"][key] for key in choices}
        files.append((found["run"].run_id, choices))
    assert sorted(one for one, _ in files) == [f"run{index}" for index in range(len(runs))]
    by_id = dict(files)
    for index, values in enumerate(runs):
        assert by_id[f"run{index}"] == {key: values[key] for key in ("method", "budget", "seed")}


DRAW = """
import json, sys, sweeps, yaml
config = yaml.safe_load(open(sys.argv[1]))
told = sweeps.schema_violations_from_proposed_config(config)
runs = []
for number in range(int(sys.argv[2])):
    run = sweeps.next_run(config, runs)
    if run is None:
        break
    run.state = "finished"
    run.summary_metrics = {config["metric"]["name"]: (number * 37 % 11) / 11}
    run.history = [run.summary_metrics]
    runs.append(run)
print(json.dumps({"told": told, "runs": [{k: v["value"] for k, v in run.config.items()} for run in runs]},
                 default=lambda number: number.item()))
"""


@pytest.fixture(scope="session")
def engine(tmp_path_factory) -> str:
    """The Python of an environment of its own with W&B's engine, which pins NumPy below 2."""
    given = os.environ.get("KVEXP_SWEEPS_PYTHON")
    if given:
        return given
    folder = tmp_path_factory.mktemp("sweeps")
    python = str(folder / "bin/python")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    made = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "sweeps==0.3.0"]
    done = subprocess.run(made, capture_output=True, text=True, timeout=800, check=False)
    if done.returncode:
        pytest.skip(f"W&B's engine `sweeps` cannot be installed here: {done.stderr.strip()[-200:]}")
    return python


@pytest.mark.parametrize(("name", "asked", "drawn"), [("grid", 30, 24), ("bayes", 6, 6), ("random", 8, 8)])
def test_w_and_b_s_engine_draws_runs_that_compose(
    name: str, asked: int, drawn: int, engine: str, environment
) -> None:
    from kvexp.cli import settings_of

    command = [engine, "-c", DRAW, str(SWEEPS / f"{name}.yaml"), str(asked)]
    clean = {key: value for key, value in environment.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["told"] == [] and len(found["runs"]) == drawn
    cells = set()
    for values in found["runs"]:
        words = [f"{key}={value}" for key, value in values.items()]
        (settings,) = settings_of(words if len(cells) % 2 else [f"--{word}" for word in words])
        cells.add(settings.cell)
    # full and no_context ignore the budget: two runs of the grid are one cell, reported as done
    assert len(cells) == 18 if name == "grid" else len(cells) > 1
