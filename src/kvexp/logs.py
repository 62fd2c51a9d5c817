"""Which log lines go where: only the first rank speaks, and tracebacks go to the file alone."""

from __future__ import annotations

import logging
import os

RANK_VARIABLES = ("RANK", "SLURM_PROCID", "LOCAL_RANK")
DEBUG_VARIABLE = "KVEXP_DEBUG"


def rank() -> int:
    """Return the rank of this process as its launcher wrote it into the environment; 0 without a launcher."""
    for name in RANK_VARIABLES:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def debugging() -> bool:
    """Return whether KVEXP_DEBUG asks for tracebacks on the terminal."""
    return os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


class FirstRank(logging.Filter):
    """Lets a record pass on rank 0, and warnings on every rank."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether `record` is to be shown."""
        return record.levelno >= logging.WARNING or rank() == 0


class NoTraceback(logging.Filter):
    """Holds back records with a traceback unless KVEXP_DEBUG is set; their sentence is printed at the end."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether `record` is to be shown."""
        return record.exc_info is None or debugging()
