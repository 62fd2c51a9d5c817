"""`scripts/sync_offline.sh` sends each run that was logged offline once; `wandb` is a stand-in."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/sync_offline.sh"
# Notes what it was called with, and marks a run as the real one does; a run named `bad` cannot be sent.
WANDB = """#!/usr/bin/env bash
echo "$*" >> "$CALLS"
run="${@: -1}"
[[ $run != *bad* ]] && touch "$run/run.wandb.synced"
"""


def made(folder: Path, *names: str) -> None:
    for name in names:
        run = folder / f"outputs/task/model/m/b1/{name}/wandb/offline-run-1-{name}"
        run.mkdir(parents=True)
        (run / "run.wandb").write_text("")


def sync(folder: Path, *words: str) -> tuple[int, str, list[str]]:
    program = folder / "bin/wandb"
    program.parent.mkdir(exist_ok=True)
    program.write_text(WANDB)
    program.chmod(0o755)
    calls = folder / "calls"
    calls.write_text("")
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "CALLS": str(calls)}
    done = subprocess.run(
        [SCRIPT, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines()


def test_each_run_is_sent_once(tmp_path: Path) -> None:
    made(tmp_path, "a", "with space")
    code, said, calls = sync(tmp_path)
    assert code == 0 and said.endswith("2 runs sent, 0 not\n")
    assert [call.rpartition("offline-run-1-")[2] for call in calls] == ["a", "with space"]
    made(tmp_path, "c")
    code, said, calls = sync(tmp_path, "outputs", "--project", "p")
    assert code == 0 and said == "1 runs sent, 0 not\n"
    assert len(calls) == 1 and calls[0].startswith("sync --project p outputs/task/model/m/b1/c/")


def test_a_run_that_cannot_be_sent_is_told_and_the_others_go(tmp_path: Path) -> None:
    made(tmp_path, "bad", "good")
    code, said, calls = sync(tmp_path, "outputs")
    assert code == 1 and len(calls) == 2 and "could not send outputs" in said
    assert "1 runs sent, 1 not\n" in said


def test_no_folder_is_a_sentence(tmp_path: Path) -> None:
    code, said, calls = sync(tmp_path, "nope")
    assert code == 2 and "nope is not a folder" in said and calls == []
