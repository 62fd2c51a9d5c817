"""A rank that another process started ends with it, at once and in whatever state it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvexp.crew import children
from kvexp.crew.children import Children
from waiting import until

ROOT = Path(__file__).parents[2]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
PARENT = """
import os, sys, time
from kvexp.crew.children import Children
children = Children()
children.start(sys.argv[1:], os.environ | {"RANK": "1"})
print(children._processes[0].pid, flush=True)
time.sleep(60)
"""
WORDS = (
    "-m kvexp model=tiny-llama task=intents trainer=ddp trainer.accelerator=cpu trainer.devices=2 logger=none"
)
IMPORTING = "from kvexp.crew.children import end_with_parent; end_with_parent(); import time; time.sleep(60)"


def parent(*words: str) -> tuple[subprocess.Popen, int]:
    """Start a process that starts another; return it, and the id of the other."""
    paths = os.pathsep.join(str(ROOT / part) for part in ("src", "kernels"))
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, *words],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def gone(process: int) -> bool:
    """Whether a process is not there, or waits to be collected by init."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@LINUX
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("after", [0.0, 0.4], ids=["before its first line", "while it imports"])
def test_a_rank_that_still_imports_ends_with_its_parent(
    number: int, after: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    process, child = parent(*WORDS.split())
    time.sleep(after)
    assert not gone(child)
    process.send_signal(number)
    process.wait()
    until(lambda: gone(child), 2)


@LINUX
def test_a_rank_that_is_stopped_ends_with_its_parent() -> None:
    process, child = parent("-c", IMPORTING)
    time.sleep(0.5)
    os.kill(child, signal.SIGSTOP)
    process.terminate()
    process.wait()
    until(lambda: gone(child), 2)


def test_ranks_that_do_not_leave_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is stopped; one that leaves by itself ends as it likes."""
    monkeypatch.setattr(children, "LEAVE_AT_ONCE", 0.5)
    three, failed = Children(), []
    for text in ("import time; time.sleep(60)", "import time; time.sleep(60)", "raise SystemExit(7)"):
        three.start(["-c", text], os.environ, failed.append)
    busy, stopped, leaving = three._processes
    stopped.send_signal(signal.SIGSTOP)
    leaving.wait()
    begun = time.monotonic()
    three.leave(well=False)
    until(lambda: len(failed) == 3, 5)
    assert [one.returncode for one in (busy, stopped, leaving)] == [-9, -9, 7]
    assert time.monotonic() - begun < 3


def test_ranks_that_have_done_their_part_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "LEAVE_AT_ONCE", 0.0)
    one, failed = Children(), []
    one.start(["-c", "import time; time.sleep(0.3)"], os.environ, failed.append)
    one.leave(well=True)
    assert one._processes[0].returncode == 0 and not failed
