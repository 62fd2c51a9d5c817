"""Two processes that share the traces leave the memory that one leaves, up to the order of samples."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import lightning
import pytest
import torch

from kvexp import cli, model
from kvexp.calibration.prepare import draw_traces, prepare
from kvexp.methods.memory.states import StateMemory

ROOT = Path(__file__).parents[2]
WORDS = [
    "model=tiny-llama",
    "task=intents",
    "task.context_tokens=200",
    "task.n_calibration=2",
    "limit=2",
    "budget=4096",
    "calibration.n=5",  # one batch, were it not for two processes
    "method.layout=pooled",
    "method.samples=float32",
    "logger=none",
]
TWO = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """The output folder of a run on two processes, through the command line."""
    folder = tmp_path_factory.mktemp("two")
    paths = os.pathsep.join(str(ROOT / part) for part in ("src", "kernels"))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", "kvexp", *WORDS, *TWO, f"output_dir={folder}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "MEMBER: 2/2" in done.stderr
    return folder


def alone(folder: Path) -> StateMemory:
    """The memory that this process makes of the same command line."""
    [run] = cli.settings_of([*WORDS, f"output_dir={folder}"])
    loaded = model.load(run.model)
    task = run.task.load(loaded.tokenizer, seed=run.seed, limit=run.limit)
    traces = draw_traces(run.calibration, task, loaded, task.context, run.seed)
    trainer = partial(lightning.Trainer, accelerator="cpu", devices=1)
    how = (run.budget, run.seed, run.store_dir, run.calibration.batch_size, trainer)
    return prepare(run.method, loaded, task.context, traces, *how)[0]


def test_two_processes_make_the_memory_of_one(two, tmp_path):
    """Every distinct query is an entry of its own; sorted by log Z, the entries are the same."""
    [folder] = (two / "store").glob("asm-*")
    ours, expected = StateMemory.load(folder, {}), alone(tmp_path)
    differ = {"sha256", "format"}  # what only a saved memory has
    assert {k: v for k, v in ours.manifest.items() if k not in differ} == {
        k: v for k, v in expected.manifest.items() if k not in differ
    }
    for index, layer in expected.layers.items():
        other = ours.layers[index]
        assert other.count.sum(1).tolist() == layer.count.sum(1).tolist()
        for book in range(layer.grouping.codebooks):
            a, b = (x.log_z[book, :, 0].argsort() for x in (layer, other))
            torch.testing.assert_close(layer.log_z[book][a], other.log_z[book][b], rtol=0, atol=1e-4)
            assert torch.equal(layer.count[book][a].sort().values, other.count[book][b].sort().values)
            means = [
                (x.keys[book] * x.norm[book][:, None] * x.count[book][:, None]).sum(0) for x in (layer, other)
            ]
            torch.testing.assert_close(*means, rtol=1e-4, atol=1e-2)
            means = [(x.a[book] * x.count[book][:, None, None]).sum(0) for x in (layer, other)]
            torch.testing.assert_close(*means, rtol=1e-4, atol=1e-2)


def test_one_record_and_no_samples_are_left(two):
    """The second process ends after its share: it evaluates nothing and writes nothing but samples."""
    assert len(list(two.glob("intents/tiny-llama/asm/b4096/*/record.json"))) == 1
    [samples] = two.glob("intents/tiny-llama/asm/b4096/*/samples.jsonl")
    assert len(samples.read_text().splitlines()) == 2
    assert not list((two / "store").glob("samples-*"))
