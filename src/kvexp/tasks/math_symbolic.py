"""Symbolic equality in a process of its own, which is ended when it takes too long.

math_verify limits its time with an alarm signal, which needs the main thread, takes the alarm from whoever
else has set one, and never interrupts one long operation, such as a power of a power that a model writes
down. So the comparison runs in a child process, with math_verify's own limits off; it starts with the first
question (about a second), serves the following ones, and starts anew after one that it did not survive.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from typing import IO, Any

_START_SECONDS = 120.0
_MEMORY_BYTES = 4 << 30
_ORPHAN_SECONDS = 60  # after which a child whose parent was killed gives up
_RELATIVE = 1e-4
_READY = "ready"


def symbolically_equal(answer: str, expected: str, seconds: float = 10.0) -> bool:
    """Tell whether two pieces of LaTeX mean the same; False where one cannot be read.

    Args:
        answer: what is asked about, in the spelling of `kvexp.tasks.math_text.clean`.
        expected: the reference; the two are not symmetric where one names a variable.
        seconds: how long to wait; longer counts as not equal.

    Raises:
        RuntimeError: the process does not start, such as where math_verify is not installed.
    """
    with _lock:
        return _checker().ask(answer, expected, seconds)


class _Checker:
    """The child process and the thread that reads its lines."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        # -P: a file of the user's folder or of this one must not pass for a library.
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        if self._next(_START_SECONDS) != _READY:
            self.close()
            raise RuntimeError("the checker of answers does not start: run `python -c 'import math_verify'`")

    @property
    def usable(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def ask(self, answer: str, expected: str, seconds: float) -> bool:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps([answer, expected]) + "\n")
            self.process.stdin.flush()
            found = self._next(seconds)
            if found:
                return found == "true"
        self.close()
        return False

    def close(self) -> None:
        """End the process, unless it belongs to the process that this one was forked from."""
        if self.owner == os.getpid():
            self.process.kill()
            self.process.communicate()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):  # closed while it was read
            for line in self.process.stdout:
                self.lines.put(line.strip())
        self.lines.put("")

    def _next(self, seconds: float) -> str:
        try:
            return self.lines.get(timeout=seconds)
        except queue.Empty:
            return ""


_lock = threading.Lock()
_running: _Checker | None = None


def _checker() -> _Checker:
    global _running
    if _running is None:
        atexit.register(_close)
    if _running is None or not _running.usable:
        _running = _Checker()
    return _running


def _close() -> None:
    if _running is not None:
        _running.close()


def _serve(asked: IO[str], told: IO[str]) -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # no limits here, or lower ones
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    import math_verify

    print(_READY, file=told, flush=True)
    alarm = getattr(signal, "alarm", lambda seconds: None)  # its default ends even one long operation
    for line in asked:
        alarm(_ORPHAN_SECONDS)
        try:
            equal = _equal(math_verify, *json.loads(line))
        except Exception:  # whatever the expression does to the parser, it is not equal
            equal = False
        alarm(0)
        print(json.dumps(equal), file=told, flush=True)


def _equal(math_verify: Any, answer: str, expected: str) -> bool:
    # Units are gone already, and taking more of them away would make `5m` a 5.
    reading = math_verify.LatexExtractionConfig()
    spelling = dataclasses.replace(reading.normalization_config, units=False)
    reading = dataclasses.replace(reading, normalization_config=spelling)

    def parse(text: str) -> list[Any]:
        boxed = rf"\boxed{{{text}}}"
        return math_verify.parse(boxed, [reading], fallback_mode="no_fallback", parsing_timeout=None)

    reference, target = parse(expected), parse(answer)
    if not reference or not target:
        return False
    # Rounded at the twelfth place: fixed places are wide for small values, so `_close_numbers` has tolerance.
    exact = {"float_rounding": 12, "allow_set_relation_comp": True, "timeout_seconds": None}
    return math_verify.verify(reference, target, **exact) or _close_numbers(reference[0], target[0])


def _close_numbers(reference: Any, target: Any) -> bool:
    from sympy import Expr, Float

    if not isinstance(reference, Expr) or not isinstance(target, Expr):
        return False
    if not reference.is_number or not target.is_number or reference.doit().is_integer:
        return False
    if not reference.has(Float) and not target.has(Float):
        return False
    wanted, found = complex(reference.doit().evalf()), complex(target.doit().evalf())
    return abs(found - wanted) <= _RELATIVE * abs(wanted)


if __name__ == "__main__":
    _out, sys.stdout = sys.stdout, sys.stderr
    _serve(sys.stdin, _out)
