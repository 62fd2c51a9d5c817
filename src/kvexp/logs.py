"""Which log lines go where: only the first rank speaks, and tracebacks go to the file alone."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvexp.files import read_only

RANK_VARIABLES = ("RANK", "SLURM_PROCID", "LOCAL_RANK")
DEBUG_VARIABLE = "KVEXP_DEBUG"
LIGHTNING = (
    *("lightning", "lightning.pytorch", "lightning.pytorch.utilities.rank_zero"),
    *("lightning.fabric", "lightning.fabric.utilities.rank_zero", "lightning.fabric.utilities.distributed"),
)
UNWANTED = (
    *(".*does not have many workers.*", ".*predict returned None.*", ".*LeafSpec.*"),
    ".*`srun` command is available.*",
)


def rank() -> int:
    """Return the rank of this process as its launcher wrote it into the environment; 0 without a launcher."""
    for name in RANK_VARIABLES:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def debugging() -> bool:
    """Return whether KVEXP_DEBUG asks for tracebacks on the terminal."""
    return os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


class RunLog(logging.FileHandler):
    """Writes the log of a run; nowhere where the folder is read-only, whose cell may be complete."""

    def __init__(self, filename: str, encoding: str | None = None) -> None:
        path = Path(filename)
        super().__init__(os.devnull if read_only(path.parent, path.name) else path, encoding=encoding)


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


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep Lightning's advertisements, and its advice that is wrong for calibration, out of the log."""
    loggers = [logging.getLogger(name) for name in LIGHTNING]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in UNWANTED:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
