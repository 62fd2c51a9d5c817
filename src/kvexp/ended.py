"""How a command ends: its exit code, one sentence for a mistake, a bad file or Ctrl-C, a quiet pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

from kvexp.errors import UserError

FAILED, WRONG, INTERRUPTED = 1, 2, 130


def ended(
    command: Callable[[], int], advice: str, name: str = "kvexp", interrupted: str = "interrupted"
) -> int:
    """Return the exit code of `command`: its own, 2 for a UserError, 1 for a file that cannot be used.

    `advice` ends the sentence about such a file, `name` starts every sentence, and `interrupted` is the one
    after Ctrl-C (130). A reader that closes the pipe early (`| head`) is no error.
    """
    try:
        code = command()
        sys.stdout.flush()
        return code
    except UserError as error:
        return say(str(error), WRONG, name)
    except KeyboardInterrupt:
        return say(interrupted, INTERRUPTED, name)
    except BrokenPipeError:
        _silence()
        return 0
    except OSError as error:
        file = error.filename
        if file is None:  # standard output, or a library that does not tell
            _silence()
        told = f"{file or 'the output'} cannot be used ({error.strerror or error}): {advice}"
        return say(told, FAILED, name)


def say(sentence: str, code: int, name: str = "kvexp") -> int:
    """Print one line of `name` on standard error and return `code`."""
    print(f"{name}: {' '.join(sentence.split())}", file=sys.stderr)
    return code


def _silence() -> None:
    """Leave nothing for the interpreter's end to write, which would fail once more."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
