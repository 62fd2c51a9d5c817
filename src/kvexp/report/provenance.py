"""Where a result comes from: code, versions, machine, model, data, command, times."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = (
    "kvexp",
    "torch",
    "transformers",
    "lightning",
    "hydra-core",
    "lm-eval",
    "faiss-cpu",
    "faiss-gpu",
    "wandb",
    "triton",
)


def start_provenance(command: str | None = None) -> dict[str, Any]:
    """Return what is known when a run starts.

    `command` repeats this one cell; without it, it is the command line that started the process, which in a
    grid stands for many.
    """
    return {
        "git": git_state(),
        "versions": versions(),
        "command": command or command_line(),
        "host": socket.gethostname(),
        "started": utc_now(),
    }


def finish_provenance(
    started: Mapping[str, Any],
    *,
    device: str,
    threads: int | None = None,
    model_sha256: str | None = None,
    data_sha256: str | None = None,
    task: Mapping[str, Any] | None = None,
    processes: int = 1,
) -> dict[str, Any]:
    """Return `started` with what is known at the end; `device` ("cpu", "cuda:0", ...) is named in full.

    `task` is what the task says of its questions, such as the memory that their contexts come from.
    """
    return {
        **started,
        **({"task": dict(task)} if task else {}),
        **({"processes": processes} if processes > 1 else {}),
        "device": device_name(device),
        "threads": threads,
        "model_sha256": model_sha256,
        "data_sha256": data_sha256,
        "finished": utc_now(),
    }


def utc_now() -> str:
    """Return the time in UTC, to the second, such as "2026-01-31T08:05:00Z"."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide a result, without importing them."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def command_line(words: Sequence[str] | None = None) -> str:
    """Return the words of a command (by default the process's own) as a shell reads them back."""
    program, *arguments = sys.orig_argv if words is None else words
    return shlex.join([Path(program).name, *arguments])


def device_name(device: str) -> str:
    """Return `device` with the name of the chip behind it, such as "cuda:0 (NVIDIA H200)"."""
    if device.startswith("cuda"):
        import torch

        return f"{device} ({torch.cuda.get_device_name(device)})"
    chip = _cpu_name() if device == "cpu" else platform.processor()
    return f"{device} ({chip})" if chip else device


def git_state(file: str | Path = __file__) -> dict[str, Any] | None:
    """Return the commit of the checkout that tracks `file`, and whether it has changes; None outside of one.

    A kvexp that is installed into a folder that happens to lie in another project's checkout is not tracked
    there.
    """
    file = Path(file).resolve()
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    commit = _git(file.parent, "rev-parse", "HEAD")
    changes = _git(file.parent, "status", "--porcelain")
    return None if commit is None or changes is None else {"commit": commit, "dirty": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints, or None when it is absent, slow or refuses."""
    # Inside a git hook these variables point at the repository of the hook.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=30,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    """Return the name of the processor; platform.processor is often empty on Linux."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for row in info.read_text(errors="replace").splitlines():
            if row.startswith("model name"):
                return row.partition(":")[2].strip()
    return platform.processor() or platform.machine()
