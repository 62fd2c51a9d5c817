"""Cells of a tiny model on the generated task, from the words of a command line."""

from __future__ import annotations

from pathlib import Path

from kvexp.cli import settings_of
from kvexp.schema import Settings

WORDS = (
    "model=tiny-llama task=intents method=asm budget=64 calibration.n=24 logger=none batch_size=4 limit=12 "
    "task.context_tokens=700 task.n_labels=4 task.n_calibration=6"
).split()
BATCHES = 3  # of the test's 12 documents


def words(folder: Path, *more: str) -> list[str]:
    """The command line of one cell, with `more` words in place of those that set the same keys."""
    chosen = dict(word.split("=", 1) for word in (*WORDS, f"output_dir={folder}", *more))
    return [f"{key}={value}" for key, value in chosen.items()]


def cell(folder: Path, *more: str) -> Settings:
    """The settings of one cell."""
    (settings,) = settings_of(words(folder, *more))
    return settings


def samples_of(settings: Settings) -> bytes:
    """The bytes of a cell's samples."""
    return (settings.run_dir / "samples.jsonl").read_bytes()
