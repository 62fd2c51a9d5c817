"""Where a result is sent besides its own folder: nowhere, one CSV file, Weights & Biases, a local tracker.

Every logger has four verbs: `start(job)`, `metrics(record)`, `samples(rows)`, `finish(status, error)`. A
logger never ends a run: what it raises is told once, and the run goes on without it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from kvexp.errors import UserError, suggest
from kvexp.files import Say, tell
from kvexp.logs import rank as global_rank

Outcome = Literal["complete", "failed", "preempted"]


@dataclass(frozen=True)
class Job:
    """What loggers know of one run: its cell, folders, choices and whole configuration, as plain data."""

    cell: str
    folder: Path
    output_dir: Path
    choices: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """A short name for people, such as "asm-intents-b1024-s0"."""
        return "{method}-{task}-b{budget}-s{seed}".format(**self.choices)


class Logger(Protocol):
    """The four verbs; `metrics` takes the run's record, `samples` the lines of samples.jsonl."""

    def start(self, job: Job) -> None:
        """Begin to log one run."""

    def metrics(self, record: Mapping[str, Any]) -> None:
        """Log the numbers of the result."""

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log what was asked and answered."""

    def finish(self, status: Outcome, error: str | None = None) -> None:
        """End the run, with one line of reason when it failed."""


class NoLogger:
    """Logs nothing."""

    def start(self, job: Job) -> None:
        """Do nothing."""

    def metrics(self, record: Mapping[str, Any]) -> None:
        """Do nothing."""

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing."""

    def finish(self, status: Outcome, error: str | None = None) -> None:
        """Do nothing."""


class Guarded:
    """Passes the verbs to `inner`; the first exception is told through `say` and switches the logger off."""

    def __init__(self, inner: Logger, say: Say = tell) -> None:
        self.inner = inner
        self._say = say
        self._started = False
        self._broken = False

    def start(self, job: Job) -> None:
        """Begin to log one run."""
        self._call("start", job)
        self._started = not self._broken

    def metrics(self, record: Mapping[str, Any]) -> None:
        """Log the numbers of the result."""
        self._call("metrics", record)

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log what was asked and answered."""
        self._call("samples", rows)

    def finish(self, status: Outcome, error: str | None = None) -> None:
        """End the run; a logger that broke half-way is still closed, or it would swallow the next run."""
        if self._broken and self._started:
            with contextlib.suppress(Exception):
                self.inner.finish(status, error)
        self._call("finish", status, error)

    def _call(self, verb: str, *arguments: Any) -> None:
        if self._broken:
            return
        try:
            getattr(self.inner, verb)(*arguments)
        except Exception as error:
            self._broken = True
            reason = " ".join(str(error).split()) or type(error).__name__
            self._say(f"{type(self.inner).__name__} failed and is off for the rest of this run: {reason}")


NAMES = ("auto", "none", "csv", "wandb", "trackio", "mlflow", "tensorboard")


def make_logger(name: str, *, rank: int | None = None, say: Say = tell, **knobs: Any) -> Guarded:
    """Return the logger `name`, one of `NAMES`; `knobs` are those of `WandbLogger`, and others use some.

    "auto" is wandb when its key or a sweep is in the environment, else none. Ranks above 0 log nothing.
    Raises UserError for another name.
    """
    if name not in NAMES:
        raise UserError(f"logger={name} is unknown{suggest(name, NAMES)}; choose one of {', '.join(NAMES)}")
    if name == "auto":
        name = "wandb" if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_SWEEP_ID") else "none"
    if (global_rank() if rank is None else rank) > 0:
        name = "none"
    return Guarded(_logger(name, knobs), say)


def _logger(name: str, knobs: Mapping[str, Any]) -> Logger:
    """Return the logger; its module, which may need a package that is not installed, is imported here."""
    if name == "csv":
        from kvexp.report.csv_logger import CsvLogger

        return CsvLogger()
    if name == "wandb":
        from kvexp.report.wandb_logger import WandbLogger

        return WandbLogger(**knobs)
    if name == "none":
        return NoLogger()
    from kvexp.report import local_loggers

    kinds: dict[str, type[local_loggers.Local]] = {
        "trackio": local_loggers.TrackioLogger,
        "mlflow": local_loggers.MlflowLogger,
        "tensorboard": local_loggers.TensorboardLogger,
    }
    return kinds[name](knobs.get("project", "kvexp"))


def summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a record under flat keys: `<task>/<metric>`, `cache/*`, `timing/*`, `budget`, ...

    A metric's standard error stands beside it as `<task>/<metric>_stderr`. Numbers that were not taken are
    left out. The budget `full` becomes the length of the context, so that it can be drawn on the axis of the
    others.
    """
    task, cache = record["choices"]["task"], record["cache"]
    budget = record["choices"]["budget"]
    flat: dict[str, Any] = {"budget": cache.get("context_tokens") if budget == "full" else budget}
    for name, metric in record["metrics"].items():
        flat[f"{task}/{name}"] = metric["value"]
        flat[f"{task}/{name}_stderr"] = metric["stderr"]
    for section in ("cache", "timing", "fidelity"):
        flat.update(flatten(record[section] or {}, f"{section}/", "/"))
    return {key: value for key, value in flat.items() if value is not None}


def flatten(values: Mapping[str, Any], prefix: str = "", separator: str = ".") -> dict[str, Any]:
    """Return nested mappings as one, keys joined with `separator`: `{"a": {"b": 1}}` becomes `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}{separator}", separator))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
