"""Twins of operations in C++, for steps on the CPU that are too small for torch's cost per operation.

They are compiled once for each machine, by the compiler that is found (`CXX`, else g++ or clang++; the one
that `torch.compile` needs on a CPU), into the user's cache folder. Where there is none, or it fails, the
plain forms are used: they give the same results. The log says which.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared")
SECONDS = 120  # that a compiler may take

log = logging.getLogger(__name__)


@cache
def library(source: Path, *functions: str) -> ctypes.CDLL | None:
    """Return the compiled library of a C++ file and the headers beside it; None where it cannot be had.

    It is made anew where the file found is not the one that was written, or lacks one of `functions`.
    """
    name, compiler = source.parent.name, _compiler()
    if compiler is None:
        log.info("%s runs in torch: there is no C++ compiler (g++ or clang++, or name one in CXX)", name)
        return None
    try:
        # Code for this processor may not run on another that shares the folder.
        texts = [path.read_text(encoding="utf-8") for path in (source, *sorted(source.parent.glob("*.h")))]
        key = "\n".join([*texts, *FLAGS, *compiler, _processor()])
        target = _folder() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
        failed = target.with_suffix(".failed")
        if failed.exists():
            log.info(
                "%s runs in torch: it could not be compiled before; delete %s to try again", name, failed
            )
            return None
        if not _whole(target):
            _compile(compiler, source, target)
        found = ctypes.CDLL(str(target))
        for function in functions:
            getattr(found, function)
        return found
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        log.info("%s runs in torch: %s", name, error)
        return None


def _compiler() -> tuple[str, ...] | None:
    """Return the words that call a compiler; CXX may name options, or a program before it."""
    wanted = os.environ.get("CXX")
    for words in [shlex.split(wanted)] if wanted else [["g++"], ["clang++"], ["c++"]]:
        path = shutil.which(words[0]) if words else None
        if path:
            return path, *words[1:]
    return None


def _compile(compiler: Sequence[str], source: Path, target: Path) -> None:
    """Compile into a file of our own and rename it: several processes may do so at once.

    A compiler that fails or hangs is not asked again: `target.failed` has what it said.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    log.info("compiling %s once, into %s", source.parent.name, target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made, sums = Path(folder) / "made.so", Path(folder) / "made.sha256"
        try:
            subprocess.run(
                [*compiler, *FLAGS, str(source), "-o", str(made)],
                check=True,
                capture_output=True,
                timeout=SECONDS,
            )
        except subprocess.SubprocessError as error:
            said = getattr(error, "stderr", None) or b""
            target.with_suffix(".failed").write_bytes(f"{error}\n".encode() + said)
            raise
        sums.write_text(_sha256(made))
        os.replace(made, target)
        os.replace(sums, target.with_suffix(".sha256"))


def _whole(target: Path) -> bool:
    """Whether a compiled file is there as it was written: a cut one would end the process."""
    try:
        return target.with_suffix(".sha256").read_text() == _sha256(target)
    except (OSError, UnicodeDecodeError):
        return False


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _folder() -> Path:
    """Return the folder in the user's cache; RuntimeError where there is no home."""
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
