"""Atomic writes and the lock."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from kvexp import files
from kvexp.errors import UserError


@pytest.fixture
def python():
    """A function that starts Python on some code; what it started is killed and closed at the end."""
    with contextlib.ExitStack() as stack:

        def start(code: str, *arguments: object) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


HOLD = """
    import sys, time
    from pathlib import Path
    from kvexp.files import file_lock
    with file_lock(Path(sys.argv[1]), lambda _: print("waits", flush=True)):
        print("held", flush=True)
        time.sleep(float(sys.argv[2]))
"""


def test_a_write_that_fails_keeps_the_old_file_and_leaves_nothing(tmp_path, monkeypatch):
    target = tmp_path / "record.json"
    files.write_atomic(target, b"old")

    def no_space(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="no space"):
        files.write_atomic(target, b"new and longer")
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_a_folder_is_made_or_told_by_its_name(tmp_path, monkeypatch):
    files.check_writable(tmp_path / "a/b")
    assert list((tmp_path / "a/b").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="Not a directory") as caught:
        files.check_writable(tmp_path / "file")
    assert caught.value.filename == str(tmp_path / "file")

    def read_only(dir):
        raise OSError(errno.EROFS, "Read-only file system", f"{dir}/tmp1")

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    with pytest.raises(OSError, match="Read-only file system") as caught:
        files.check_writable(tmp_path)
    assert caught.value.filename == str(tmp_path)


def test_a_reader_never_sees_half_a_file(tmp_path, python):
    target = tmp_path / "record.json"
    values = [b"a" * 200_000, b"b" * 100_000]
    files.write_atomic(target, values[0])
    writer = python(
        """
        import sys
        from pathlib import Path
        from kvexp.files import write_atomic
        for index in range(60):
            write_atomic(Path(sys.argv[1]), [b"b" * 100_000, b"a" * 200_000][index % 2])
        """,
        target,
    )
    while writer.poll() is None:
        assert target.read_bytes() in values
    assert writer.wait() == 0


def test_a_new_file_gets_the_permissions_of_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        files.write_atomic(tmp_path / "record.json", b"{}")
    finally:
        os.umask(old)
    assert (tmp_path / "record.json").stat().st_mode & 0o777 == 0o640


def test_leftovers_of_killed_writers_are_removed_and_nothing_else(tmp_path):
    for name in (".record.json.0a1b.tmp", "record.json", ".lock", "notes.tmp"):
        (tmp_path / name).touch()
    files.remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "notes.tmp", "record.json"]


def test_the_second_waits_and_names_who_holds_the_lock(tmp_path, python):
    holder = python(HOLD, tmp_path / ".lock", 0.5)
    assert holder.stdout.readline() == "held\n"
    said: list[str] = []
    with files.file_lock(tmp_path / ".lock", said.append):
        assert holder.poll() == 0 or holder.wait(5) == 0
    host = os.uname().nodename
    assert said == [f"waiting for {tmp_path}: process {holder.pid} on {host} is working on it"]
    assert (tmp_path / ".lock").read_bytes() == b""


def test_a_free_lock_says_nothing(tmp_path):
    said: list[str] = []
    for _ in range(2):
        with files.file_lock(tmp_path / "deep" / ".lock", said.append):
            pass
    assert said == []


def test_a_killed_holder_frees_the_lock(tmp_path, python):
    holder = python(HOLD, tmp_path / ".lock", 60)
    assert holder.stdout.readline() == "held\n"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    start = time.monotonic()
    with files.file_lock(tmp_path / ".lock"):
        assert time.monotonic() - start < 5


def test_a_forked_worker_does_not_keep_the_lock_of_a_killed_run(tmp_path, python):
    run = python(
        """
        import os, sys, time
        from pathlib import Path
        from kvexp.files import file_lock
        with file_lock(Path(sys.argv[1])):
            worker = os.fork()
            if worker == 0:
                os.closerange(0, 3)
                time.sleep(30)
                os._exit(0)
            print(worker, flush=True)
            time.sleep(60)
        """,
        tmp_path / ".lock",
    )
    worker = int(run.stdout.readline())
    try:
        run.kill()
        run.wait()
        start = time.monotonic()
        with files.file_lock(tmp_path / ".lock"):
            assert time.monotonic() - start < 5
    finally:
        os.kill(worker, signal.SIGKILL)


def test_who_waited_for_a_folder_that_was_removed_waits_for_the_new_one(tmp_path, python):
    path = tmp_path / "cell" / ".lock"
    holder = python(HOLD, path, 60)
    assert holder.stdout.readline() == "held\n"
    waiter = python(HOLD, path, 0)
    assert waiter.stdout.readline() == "waits\n"
    path.unlink()
    path.parent.rmdir()
    with files.file_lock(path):
        holder.kill()
        time.sleep(0.3)
        assert waiter.poll() is None
    assert waiter.stdout.read() == "held\n"
    assert waiter.wait(10) == 0


def test_a_file_system_without_locks_is_told_in_one_sentence(tmp_path, monkeypatch):
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(files.errno.ENOLCK, "no locks available")

    monkeypatch.setattr(files.fcntl, "flock", unsupported)
    with (
        pytest.raises(UserError, match=r"has no file locks.*output_dir"),
        files.file_lock(Path(tmp_path) / "l"),
    ):
        pass
