"""The groups that are plain data: which model, which calibration, which logger."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvexp.errors import UserError

ANY_MODEL = "hf"


def slug(name: str) -> str:
    """Return `name` as one part of a path: letters, digits, dot, dash and underscore."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "unnamed"


def at_least(key: str, value: int, minimum: int) -> None:
    """Raise UserError when `value` is below `minimum`."""
    if value < minimum:
        raise UserError(f"{key}={value} is not possible: {key} is at least {minimum}")


def refuse_partial(trainer: Mapping[str, Any]) -> None:
    """Raise UserError for a trainer key that runs a part of the traces: it would pass for the whole."""
    for key, value in trainer.items():
        partial = key.startswith("limit_") or key in ("fast_dev_run", "overfit_batches")
        if partial and value is not None and value is not False:
            raise UserError(
                f"trainer.{key}={value} would learn from a part of the traces and keep it as whole: leave it"
                " out, and lower calibration.n for a short run"
            )


@dataclass(frozen=True)
class ModelSpec:
    """A model and how it is loaded: plain data, no weights."""

    name: str
    source: Literal["embedded", "hub", "tiny"] = "hub"
    id: str | None = None
    revision: str | None = None
    family: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    device_map: str | None = None
    attention: Literal["auto", "reference", "flash", "flex"] = "auto"
    prefill_chunk: int = 1024
    full_attention: bool = True  # false: every layer has a sliding window

    @property
    def label(self) -> str:
        """The name in folders and records; one of any model of the hub is told by its id."""
        return f"{self.name}-{slug(Path(self.id).name)}" if self.name == ANY_MODEL and self.id else self.name

    def __post_init__(self) -> None:
        at_least("model.prefill_chunk", self.prefill_chunk, 1)
        if self.source == "hub" and not self.id:
            raise UserError(
                f"model={self.name} needs model.id=..., the name of a model on the hub or a local folder"
            )
        if self.source == "tiny" and not self.family:
            raise UserError(f"model={self.name} needs model.family=..., such as llama")


@dataclass(frozen=True)
class CalibrationSpec:
    """What a method learns from: `n` traces of the task, or of another label task."""

    name: Literal["traces"] = "traces"
    n: int = 300
    labels: Literal["none", "gold", "wrong", "model"] = "none"
    task: str | None = None
    empty_prefix: bool = False
    keep_samples: bool = False
    batch_size: int = 32

    def __post_init__(self) -> None:
        at_least("calibration.n", self.n, 1)
        at_least("calibration.batch_size", self.batch_size, 1)


@dataclass(frozen=True)
class LoggerSpec:
    """Where numbers go beside the run folder."""

    name: Literal["auto", "none", "csv", "wandb"] = "auto"
    project: str = "kvexp"
    entity: str | None = None
    mode: Literal["online", "offline"] | None = None

    def resolved(self, environment: Mapping[str, str] = os.environ) -> str:
        """Return none, csv or wandb: `auto` is wandb where its key or a sweep is in the environment."""
        if self.name != "auto":
            return self.name
        return "wandb" if environment.get("WANDB_API_KEY") or environment.get("WANDB_SWEEP_ID") else "none"
