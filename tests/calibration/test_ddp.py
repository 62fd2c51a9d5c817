"""Real processes, started by the command line: they leave what one leaves, and a dead one is noticed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cells import samples_of
from kvexp import cli
from kvexp.run import run
from waiting import until

ROOT = Path(__file__).parents[2]
WORDS = [
    "model=tiny-llama",
    "task=intents",
    "task.context_tokens=200",
    "task.n_calibration=2",
    "limit=6",
    "batch_size=2",
    "budget=4096",
    "calibration.n=5",
    "calibration.batch_size=2",
    "method.layout=pooled",
    "method.samples=float32",
    "logger=none",
]
QUESTIONS = "task=passkey task.context_tokens=120 task.n=2 task.n_facts=3 method=snapkv budget=60"
TWO = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]


def start(folder: Path, *more: str, rank: int | None = None, port: int = 0) -> subprocess.Popen:
    """Start the command line on two processes; with a rank, one of them, as a launcher does."""
    paths = os.pathsep.join(str(ROOT / part) for part in ("src", "kernels"))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
        environment.pop(name, None)
    if rank is not None:
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-m", "kvexp", *WORDS, *TWO, f"output_dir={folder}", *more],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_make_the_files_of_one(tmp_path: Path) -> None:
    """Memory and samples, byte for byte; one record, and nothing else is left."""
    two = tmp_path / "two"
    two.mkdir()
    process = start(two)
    [alone] = cli.settings_of([*WORDS, f"output_dir={tmp_path / 'one'}"])
    run(alone)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "Initializing" not in said and "litlogger" not in said
    [settings] = cli.settings_of([*WORDS, f"output_dir={two}"])
    record = json.loads((settings.run_dir / "record.json").read_text())
    assert record["status"] == "complete" and record["provenance"]["processes"] == 2
    [memory] = two.glob("store/asm-*/memory.safetensors")
    assert memory.read_bytes() == next((tmp_path / "one/store").glob("asm-*/memory.safetensors")).read_bytes()
    assert samples_of(settings) == samples_of(alone)
    assert len(list(two.rglob("record.json"))) == 1 and not list(two.rglob("samples.*.jsonl"))
    assert not list(two.rglob("samples-*")) and not list(two.rglob("work"))


def rank_1(of: subprocess.Popen) -> int:
    """Wait for the process that rank 0 starts."""
    for _ in range(1200):
        for child in Path(f"/proc/{of.pid}/task/{of.pid}/children").read_text().split():
            with contextlib.suppress(OSError):  # of a short life: what else rank 0 starts
                if b"LOCAL_RANK=1" in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                    return int(child)
        time.sleep(0.05)
    raise TimeoutError


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads /proc")
@pytest.mark.parametrize(
    "after",
    [
        pytest.param(0.5, id="as it starts", marks=pytest.mark.cluster),
        pytest.param(None, id="while it scores"),
    ],
)
def test_a_dead_rank_ends_the_run_with_a_reason(tmp_path: Path, after: float | None) -> None:
    """And the same command then goes on to the same result."""
    process = start(tmp_path, "limit=400", "batch_size=1")
    other = rank_1(process)
    if after is None:
        until(lambda: list(tmp_path.rglob("samples.1.jsonl")))
    else:
        time.sleep(after)
    os.kill(other, signal.SIGKILL)
    begun = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and time.monotonic() - begun < 30
    assert "kvexp: RankLost: rank 1" in said and "the same command goes on" in said
    [record] = tmp_path.rglob("record.json")
    written = json.loads(record.read_text())
    assert written["status"] == "failed" and written["error"].startswith("rank 1")


@pytest.mark.torture
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads /proc")
def test_a_stopped_rank_ends_the_run_with_a_reason(tmp_path: Path) -> None:
    """And is not left behind."""
    process = start(tmp_path, "limit=400", "batch_size=1", "trainer.silence_s=6")
    other = rank_1(process)
    until(lambda: list(tmp_path.rglob("samples.1.jsonl")))
    os.kill(other, signal.SIGSTOP)
    begun = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and time.monotonic() - begun < 30, said
    reason = f"rank 1 (process {other} on {socket.gethostname()}) is gone (no sign of life for 6 s): the same"
    assert f"kvexp: RankLost: {reason} command goes on" in said
    [record] = tmp_path.rglob("record.json")
    assert json.loads(record.read_text())["error"].startswith(reason)
    assert not Path(f"/proc/{other}").exists()


@pytest.mark.cluster
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads /proc")
def test_ranks_end_with_the_first(tmp_path: Path) -> None:
    process = start(tmp_path, "limit=400", "batch_size=1")
    other = rank_1(process)
    until(lambda: list(tmp_path.rglob("samples.1.jsonl")))
    process.kill()
    process.communicate(timeout=60)
    until(lambda: not Path(f"/proc/{other}").exists(), 2)


@pytest.mark.cluster
def test_processes_of_a_launcher_work_together_and_leave_together(tmp_path: Path) -> None:
    """Both end well, also where the cell is complete and there is nothing to do."""
    [alone] = cli.settings_of([*WORDS, f"output_dir={tmp_path / 'one'}"])
    run(alone)
    (tmp_path / "two").mkdir()
    for said in ("calibrated in", "this cell is complete"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        both = [start(tmp_path / "two", rank=rank, port=port) for rank in range(2)]
        heard = [process.communicate(timeout=200)[1] for process in both]
        assert [process.returncode for process in both] == [0, 0], heard
        assert said in heard[0] and said not in heard[1]
    [settings] = cli.settings_of([*WORDS, f"output_dir={tmp_path / 'two'}"])
    assert samples_of(settings) == samples_of(alone)


@pytest.mark.cluster
def test_three_processes_answer_as_one(tmp_path: Path) -> None:
    """Tasks of every kind are tried on ranks that are threads: `tests/evaluation/test_shares.py`."""
    common = ["model=tiny-llama", "logger=none", "batch_size=1", *QUESTIONS.split()]
    [alone] = cli.settings_of([*common, f"output_dir={tmp_path / 'one'}"])
    run(alone)
    three = [*common, f"output_dir={tmp_path / 'three'}", *TWO[:2], "trainer.devices=3"]
    done = subprocess.run(
        [sys.executable, "-m", "kvexp", *three],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    [settings] = cli.settings_of(three)
    assert samples_of(settings) == samples_of(alone)
