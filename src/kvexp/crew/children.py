"""The ranks that a process starts beside itself: none outlives it, whatever ends it, and however early."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

PARENT = "KVEXP_PARENT"  # the process id of the rank that started this one
_PR_SET_PDEATHSIG = 1
LEAVE, LEAVE_AT_ONCE = 60.0, 2.0  # seconds in which a rank that is to end may end by itself


def end_with_parent() -> None:
    """Have this process end with the rank that started it; for the first lines of a program.

    Linux sees to it at once, even where this process is stopped. Elsewhere a thread looks.
    """
    parent = os.environ.get(PARENT)
    if not parent:
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)

    def watch() -> None:
        while os.getppid() == int(parent):  # not so from the start where it ended before that
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="kvexp-parent").start()


class Children:
    """Processes of one command line, each with an environment of its own."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen] = []

    def start(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        failed: Callable[[subprocess.Popen], None] | None = None,
    ) -> None:
        """Start one more; `failed` is called, in another thread, when it ends badly."""
        parent = {PARENT: str(os.getpid())}
        process = subprocess.Popen([sys.executable, *words], env={**environment, **parent})
        self._processes.append(process)
        threading.Thread(target=_reap, args=(process, failed), daemon=True, name="kvexp-child").start()

    def leave(self, well: bool) -> None:
        """Let them end by themselves, which takes longer where all is `well`, and kill those that do not.

        A kill ends also one that is stopped.
        """
        until = time.monotonic() + (LEAVE if well else LEAVE_AT_ONCE)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            process.kill()


def _reap(process: subprocess.Popen, failed: Callable[[subprocess.Popen], None] | None) -> None:
    if process.wait() and failed:
        failed(process)
