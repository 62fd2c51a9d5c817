"""Files that survive a kill: atomic writes, and a lock that the kernel releases when its holder dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvexp.errors import UserError

Say = Callable[[str], None]

_held: set[int] = set()


def _drop_in_child() -> None:
    """Close inherited lock descriptors: a forked worker that outlives a killed run must not keep its lock."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_drop_in_child)


def tell(line: str) -> None:
    """Print one line to standard error at once."""
    print(line, file=sys.stderr, flush=True)


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that readers, also after a power cut, see the old or the new file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # A disk that is full tells no name, and a folder that is read-only that of the temporary file.
        if isinstance(error, OSError) and error.errno and error.filename in (None, temporary, str(temporary)):
            error.filename = str(path)
        raise
    sync_folder(path.parent)


def check_writable(folder: Path) -> None:
    """Make `folder` where it is absent; raise OSError, which names it, where no file can be written in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
    except OSError as error:
        code = errno.ENOTDIR if isinstance(error, FileExistsError) else error.errno or errno.EIO
        raise OSError(code, os.strerror(code), str(folder)) from error


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` (new, renamed, removed files) durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_only(folder: Path, *names: str) -> bool:
    """Return whether `folder` is there and it, or one of its files that are named, cannot be written to."""
    present = [path for path in (folder, *(folder / name for name in names)) if path.exists()]
    return folder.is_dir() and not all(os.access(path, os.W_OK) for path in present)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of killed writers; call it only while holding the folder's lock."""
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def file_lock(path: Path, say: Say = tell) -> Iterator[None]:
    """Hold an exclusive lock on the file `path` for the length of the block.

    A second process waits, after one line through `say` that names the process and host that hold the lock.
    The file stays behind, empty: removing it would let two processes hold locks on two files of the same
    name. In a distributed run only rank 0 may take the lock, since the other ranks of the same run would wait
    for it for ever.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _acquire(path, say)
    _held.add(descriptor)
    try:
        _write_holder(descriptor, {"pid": os.getpid(), "host": socket.gethostname()})
        yield
    finally:
        if descriptor in _held:  # not in a forked child, where it is closed already
            _write_holder(descriptor, None)
            _held.remove(descriptor)
            os.close(descriptor)


def _acquire(path: Path, say: Say) -> int:
    announced = False
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not _try_lock(descriptor, path):
                if not announced:
                    say(f"waiting for {path.parent}: {_holder(descriptor)} is working on it")
                    announced = True
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _still_named(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        path.parent.mkdir(parents=True, exist_ok=True)


def _try_lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise UserError(
                f"the file system of {path.parent} has no file locks, which keep two runs of one cell apart: "
                "choose an output_dir on another one"
            ) from error
        raise
    return True


def _still_named(descriptor: int, path: Path) -> bool:
    """Whether `path` is still the locked file: the folder may have been removed while this process waited."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _write_holder(descriptor: int, holder: dict | None) -> None:
    os.ftruncate(descriptor, 0)
    if holder:
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _holder(descriptor: int) -> str:
    """Name the holder. It writes its name just after it got the lock, so an empty file is read again."""
    for _ in range(20):
        try:
            holder = json.loads(os.pread(descriptor, 4096, 0))
            return f"process {holder['pid']} on {holder['host']}"
        except ValueError:
            time.sleep(0.01)
    return "another process"
