"""What went wrong in a run, in one sentence."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvexp.errors import UserError

if TYPE_CHECKING:
    from kvexp.schema import Settings

CHECK_FOLDERS = "check output_dir and store_dir"
_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def reason(error: BaseException, cells: Sequence[Settings] = ()) -> str:
    """Return the sentence for an error; `cells` say which folders were written to."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    if found := file_error(error):
        return f"{found.filename} cannot be used ({found.strerror}): {CHECK_FOLDERS}"
    if (full := disk_error(error)) and cells:
        folders = dict.fromkeys(str(folder) for cell in cells for folder in (cell.output_dir, cell.store_dir))
        return (
            f"a file below {' or '.join(folders)} cannot be written ({os.strerror(full)}): make room there,"
            " or choose another output_dir and store_dir; the same command then goes on"
        )
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def file_error(error: BaseException | None) -> OSError | None:
    """Return what went wrong with a file, also below what Python's logging makes of it."""
    for one in _causes(error):
        if isinstance(one, OSError) and one.filename is not None:
            return one
    return None


def disk_error(error: BaseException) -> int | None:
    """Return the number of what a disk refused: writing to an open file tells no name.

    Libraries that are not written in Python (safetensors) tell it in their text alone.
    """
    for one in _causes(error):
        told = _OS_ERROR.search(str(one))
        number = one.errno if isinstance(one, OSError) else int(told[1]) if told else None
        if number in _OF_A_DISK:
            return number
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
