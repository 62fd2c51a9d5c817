"""How a command that prints ends: its exit code, one sentence for a mistake or a bad file, a quiet pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

from kvexp.errors import UserError

FAILED, WRONG = 1, 2


def ended(command: Callable[[], int], advice: str) -> int:
    """Return the exit code of `command`: its own, 2 for a UserError, 1 for a file that cannot be used.

    `advice` ends the sentence about such a file. A reader that closes the pipe early (`| head`) is no error.
    """
    try:
        code = command()
        sys.stdout.flush()
        return code
    except UserError as error:
        return _say(str(error), WRONG)
    except BrokenPipeError:
        _silence()
        return 0
    except OSError as error:
        name = error.filename
        if name is None:  # standard output, or a library that does not tell
            _silence()
        return _say(f"{name or 'the output'} cannot be used ({error.strerror or error}): {advice}", FAILED)


def _silence() -> None:
    """Leave nothing for the interpreter's end to write, which would fail once more."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(sentence: str, code: int) -> int:
    print(f"kvexp: {' '.join(sentence.split())}", file=sys.stderr)
    return code
