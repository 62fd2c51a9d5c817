"""Twins of operations in C++, for steps on the CPU that are too small for torch's cost per operation.

They are compiled once for each machine, by the compiler that is found (`CXX`, else g++ or clang++; the one
that `torch.compile` needs on a CPU), into the user's cache folder. Where there is none, or it fails, the
plain forms are used: they give the same results.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared")
SECONDS = 120  # that a compiler may take


@cache
def library(source: Path) -> ctypes.CDLL | None:
    """Return the compiled library of a C++ file and the headers beside it; None where it cannot be had."""
    compiler = _compiler()
    if compiler is None:
        return None
    try:
        # Code for this processor may not run on another that shares the folder.
        texts = [path.read_text(encoding="utf-8") for path in (source, *sorted(source.parent.glob("*.h")))]
        key = "\n".join([*texts, *FLAGS, compiler, _processor()])
        target = _folder() / f"{source.parent.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
        if not target.exists():
            _compile(compiler, source, target)
        return ctypes.CDLL(str(target))
    except (OSError, subprocess.SubprocessError):
        return None


def _compiler() -> str | None:
    wanted = os.environ.get("CXX")
    found = (shutil.which(name) for name in ([wanted] if wanted else ["g++", "clang++", "c++"]))
    return next((path for path in found if path), None)


def _compile(compiler: str, source: Path, target: Path) -> None:
    """Compile into a file of our own and rename it: several processes may do so at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "made.so"
        subprocess.run(
            [compiler, *FLAGS, str(source), "-o", str(made)], check=True, capture_output=True, timeout=SECONDS
        )
        os.replace(made, target)


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvexp" / "native"


def _processor() -> str:
    """What the processor can do, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = {line.partition(":")[0].strip(): line for line in reversed(lines)}
    told = [named[name] for name in ("model name", "flags", "Features", "CPU part") if name in named]
    return "\n".join([platform.machine(), platform.processor(), *told])
