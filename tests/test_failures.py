"""Errors of runs as sentences."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvexp.errors import UserError
from kvexp.failures import disk_error, reason
from kvexp.files import write_atomic


def cell(folder: str) -> Any:
    return SimpleNamespace(output_dir=Path(folder), store_dir=Path(folder, "store"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_refuses_is_named_by_its_folders(code: int) -> None:
    outer = RuntimeError("the batch failed")
    outer.__cause__ = OSError(code, os.strerror(code))
    for error in (outer, outer.__cause__):
        said = reason(error, [cell("/a"), cell("/a")])
        assert said.startswith(
            f"a file below /a or /a/store cannot be written ({os.strerror(code)}): make room"
        )


def test_a_library_that_tells_the_number_in_its_text() -> None:
    told = RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert disk_error(told) == errno.ENOSPC
    assert disk_error(RuntimeError("no such thing (os error 2)")) is None


def test_other_errors() -> None:
    assert reason(OSError(errno.ECONNRESET, "reset"), [cell("/a")]).startswith("ConnectionResetError: ")
    assert reason(FileNotFoundError(errno.ENOENT, "none", "/b"), [cell("/a")]).startswith(
        "/b cannot be used (none)"
    )
    assert reason(UserError("one\n  two")) == "one two"
    assert reason(RuntimeError("the sky fell\nin two lines")) == "RuntimeError: the sky fell"
    assert reason(KeyError()) == "KeyError"


def test_a_file_that_finds_no_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomic(tmp_path / "record.json", b"{}")
    assert reason(caught.value).startswith(
        f"{tmp_path / 'record.json'} cannot be used (No space left on device)"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_read_only_is_told_by_the_file_that_was_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(file: Any, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr("builtins.open", refused)
    with pytest.raises(PermissionError) as caught:
        write_atomic(tmp_path / "record.json", b"{}")
    assert caught.value.filename == str(tmp_path / "record.json")
