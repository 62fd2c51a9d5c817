"""What went wrong in a run, in one sentence."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvexp.errors import UserError

if TYPE_CHECKING:
    from kvexp.schema import Settings

_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def reason(error: BaseException, cells: Sequence[Settings] = ()) -> str:
    """Return the sentence for an error; `cells` say which folders were written to."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    if found := file_error(error):
        return f"{found.filename} cannot be used ({found.strerror}): check output_dir and store_dir"
    if (full := _disk_error(error)) and cells:
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


def _disk_error(error: BaseException) -> int | None:
    """Return the number of what a disk refused: writing to an open file tells no name."""
    for one in _causes(error):
        if isinstance(one, OSError) and one.errno in _OF_A_DISK:
            return one.errno
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
