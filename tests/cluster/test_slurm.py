"""A real Slurm: an array with a cell that fails and one that is preempted, a killed job, two nodes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cells import samples_of
from kvexp import status
from kvexp.cli import settings_of
from kvexp.schema import Settings

pytest.importorskip("submitit", reason="pip install 'kvexp[slurm]'")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

TINY = "model=tiny-llama task=intents task.context_tokens=700 task.n_labels=4 task.n_calibration=6"
TINY += " logger=none"
JOBS = "hydra.launcher.partition=low hydra.launcher.timeout_min=20 hydra.launcher.mem_gb=1"
GRID = f"{TINY} method=truncate batch_size=1 budget=2,100,200,300,400,500 limit=150"
TOO_SMALL = "budget=2 is smaller than the prompt's header"


class Driver:
    """A command line of kvexp as a user starts it on a login node."""

    def __init__(self, words: str | list[str], environment: dict[str, str], folder: Path) -> None:
        self._err = folder / "driver.err"
        with open(self._err, "wb") as err:
            words = words.split() if isinstance(words, str) else words
            command = [sys.executable, "-m", "kvexp", *words, f"output_dir={folder / 'out'}"]
            self._process = subprocess.Popen(command, env=environment, cwd=folder, stdout=err, stderr=err)

    def wait(self) -> tuple[int, str]:
        """Return the exit code and everything that was said."""
        try:
            return self._process.wait(500), self._err.read_text()
        finally:
            self.stop()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def until(self, ready: Any, what: str) -> Any:
        """Return the first true result of `ready()`; the driver has to be alive until then."""
        end = time.monotonic() + 400
        while not (found := ready()):
            if self._process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise AssertionError(f"not seen: {what}; the driver said: {self._err.read_text()[-2000:]}")
            time.sleep(0.2)
        return found


def cells_of(words: str, folder: Path) -> list[Settings]:
    return settings_of(["-m", *words.split(), f"output_dir={folder / 'out'}"])


def samples(cell: Settings) -> int:
    path = cell.run_dir / "samples.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def busy(slurm: Any, cells: list[Settings]) -> tuple[str, str, Settings] | None:
    """A running job of the array whose cell has a few samples: its id, its node and the cell."""
    for line in slurm.run("squeue", "-h", "-r", "-t", "RUNNING", "-o", "%i %N").splitlines():
        job, node = line.split()
        index = int(job.partition("_")[2] or 0)
        if index < len(cells) and 3 <= samples(cells[index]) < 100:
            return job, node, cells[index]
    return None


def released(slurm: Any, job: str) -> bool:
    """Let a job go that was queued again, which Slurm holds for two minutes, and whether it is under way."""
    facts = slurm.run("scontrol", "show", "job", job)
    if "Reason=BeginTime" in facts:
        slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    return "JobState=PENDING" not in facts and "JobState=COMPLETING" not in facts


def states(folder: Path) -> dict[str, status.Cell]:
    found, _ = status.survey(folder / "out")
    return {cell.folder: cell for cell in found}


def test_an_array_with_a_cell_that_fails_and_one_that_is_preempted(slurm, environment, tmp_path) -> None:
    words = f"-m cluster=slurm_array {JOBS} hydra.launcher.array_parallelism=2 {GRID}"
    cells = cells_of(GRID, tmp_path)
    driver = Driver(words, slurm_environment(slurm, environment), tmp_path)
    job, node, cell = driver.until(lambda: busy(slurm, cells), "a cell with samples")
    before = samples(cell)
    slurm.run("sbatch", "-p", "high", "-w", node, "-c", "4", "-o", "/dev/null", "--wrap", "sleep 1")
    driver.until(lambda: "Restarts=1" in slurm.run("scontrol", "show", "job", job), "the job queued again")
    middle = samples(cell)
    assert before <= middle < 150 and not (cell.run_dir / "record.json").exists()
    driver.until(lambda: released(slurm, job), "the job started again")
    code, said = driver.wait()

    assert code == 1, said
    assert TOO_SMALL in said and "kvexp: 1 of 6 cells failed" in said
    told = states(tmp_path)
    assert sorted(one.state for one in told.values()) == ["complete"] * 5 + ["failed"]
    (failed,) = (one for one in told.values() if one.state == "failed")
    assert failed.reason.startswith(TOO_SMALL) and "budget=2" in failed.command
    history = slurm.run("sacct", "-D", "-X", "-n", "-j", job, "-o", "State%20").split()
    assert history[-1] == "COMPLETED" and {"REQUEUED", "PREEMPTED"} & set(history), history
    assert (cell.run_dir / "log.txt").read_text().count("run folder:") == 2

    from kvexp.run import run

    (alone,) = (one for one in cells_of(GRID, tmp_path / "alone") if one.cell == cell.cell)
    run(alone)
    assert samples_of(cell) == samples_of(alone)


def test_a_job_goes_on_after_a_time_out_and_a_killed_one_is_noticed(slurm, environment, tmp_path) -> None:
    grid = f"{TINY} task.n_test=600 method=truncate batch_size=1 budget=250"  # more than is done by the kill
    cells = cells_of(grid, tmp_path)
    # Of a job of less than ten minutes, submitit takes every warning for a time-out.
    words = f"-m cluster=slurm_array {JOBS} hydra.launcher.timeout_min=9 {grid}"
    driver = Driver(words, slurm_environment(slurm, environment), tmp_path)
    job, _, cell = driver.until(lambda: busy(slurm, cells), "a cell with samples")
    slurm.run("scancel", "--signal=USR2", job)
    driver.until(lambda: "Restarts=1" in slurm.run("scontrol", "show", "job", job), "the job queued again")
    driver.until(lambda: released(slurm, job), "the job started again")
    before = samples(cell)
    assert before >= 3 and not (cell.run_dir / "record.json").exists()
    driver.until(lambda: samples(cell) > before, "more samples")
    (log,) = (tmp_path / "out/.submitit").rglob("*_0_log.err")
    assert "this job is timed-out" in log.read_text()
    slurm.run("scancel", "--signal=KILL", "--full", job)
    code, said = driver.wait()
    assert code == 1 and "ended without a result" in said, said
    (cell,) = states(tmp_path).values()
    assert cell.state == "interrupted" and "samples" in cell.reason
    assert "budget=250" in cell.command


def test_two_nodes_go_on_after_a_preemption_and_make_the_files_of_one_process(
    slurm, environment, tmp_path
) -> None:
    grid = f"{TINY} method=asm method.layout=pooled method.samples=float32 budget=4096 calibration.n=24"
    grid += " limit=150 batch_size=1"
    nodes = "cluster=slurm_ddp trainer.accelerator=cpu trainer.devices=1 +trainer.num_nodes=2"
    launch = f"{JOBS} hydra.launcher.gpus_per_node=null hydra.launcher.cpus_per_task=1"
    # The nodes' names are no hosts.
    setup = "hydra.launcher.setup=['export MASTER_ADDR=127.0.0.1']"
    words = [*f"{nodes} {launch} {grid}".split(), setup]
    (cell,), (alone,) = cells_of(grid, tmp_path), cells_of(grid, tmp_path / "alone")
    driver = Driver(words, slurm_environment(slurm, environment), tmp_path)
    job, both, _ = driver.until(lambda: busy(slurm, [cell]), "a cell with samples")
    slurm.run("sbatch", "-p", "high", "-w", both, "-c", "4", "-o", "/dev/null", "--wrap", "sleep 1")
    driver.until(lambda: "Restarts=1" in slurm.run("scontrol", "show", "job", job), "the job queued again")
    assert samples(cell) >= 3 and not (cell.run_dir / "record.json").exists()
    driver.until(lambda: released(slurm, job), "the job started again")
    code, said = driver.wait()
    assert code == 0, said
    from kvexp.run import run

    record = json.loads((cell.run_dir / "record.json").read_text())
    assert record["status"] == "complete" and record["provenance"]["processes"] == 2
    assert (cell.run_dir / "log.txt").read_text().count("run folder:") == 2
    run(alone)
    assert samples_of(cell) == samples_of(alone)
    memories = [next(one.store_dir.glob("asm-*/memory.safetensors")) for one in (cell, alone)]
    assert memories[0].read_bytes() == memories[1].read_bytes()
    assert len(list((tmp_path / "out").rglob("record.json"))) == 1


def slurm_environment(slurm: Any, environment: dict[str, str]) -> dict[str, str]:
    return {**environment, "SLURM_CONF": slurm.environment["SLURM_CONF"]}
