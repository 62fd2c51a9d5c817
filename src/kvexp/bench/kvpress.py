"""kvpress beside us: an environment of its own, and a process in it that answers requests."""

from __future__ import annotations

import json
import os
import subprocess
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvexp.bench import theirs
from kvexp.errors import UserError

VERSION = "0.5.5"


def default_folder() -> Path:
    """Return where its environment is made, in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kvexp" / f"kvpress-{VERSION}"


def environment(folder: Path) -> Path:
    """Return the python of an environment with kvpress and our version of torch, made where there is none.

    Raises UserError where it cannot be installed.
    """
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    ready = folder / f"kvpress-{VERSION}.ready"
    if not ready.exists():
        print(f"installing kvpress {VERSION} into {folder}: some GB, some minutes", flush=True)
        venv.create(folder, with_pip=True)
        torch = f"torch=={version('torch').partition('+')[0]}"
        done = subprocess.run([python, "-m", "pip", "install", f"kvpress=={VERSION}", torch])
        if done.returncode:
            raise UserError(
                f"kvpress {VERSION} could not be installed into {folder}: what pip said stands above; give"
                " environment=FOLDER of one that has it"
            )
        ready.touch()
    return python


@contextmanager
def kvpress(folder: Path, python: Path, facts: dict[str, Any]) -> Iterator[Callable[[str, str], Any]]:
    """Yield a function that lets kvpress, in a process of its own, make a block, and returns a fact of it."""
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    command = [str(python), "-P", theirs.__file__, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        sent, answers = process.stdin, process.stdout

        def ask(name: str, fact: str) -> Any:
            sent.write(name + "\n")
            sent.flush()
            line = answers.readline()
            if not line:
                raise RuntimeError("kvpress ended: what it said stands above")
            return json.loads(line)[fact]

        yield ask
        sent.close()
