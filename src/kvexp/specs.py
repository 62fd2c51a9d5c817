"""The groups that are plain data: which model, which calibration, which logger."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvexp.errors import UserError

TRAINERS = ("lightning.Trainer", "lightning.pytorch.Trainer")
OWN_TRAINER_KEYS = ("silence_s",)  # the others are arguments of lightning.Trainer
ANY_MODEL = "hf"
NOT_STARTED = (
    "model.tp_plan=auto needs a process for each part of the model, and torchrun starts them: write torchrun"
    " --nproc-per-node=2 -m kvexp ... instead of python -m kvexp ..."
)


def slug(name: str) -> str:
    """Return `name` as one part of a path: letters, digits, dot, dash and underscore."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "unnamed"


def at_least(key: str, value: int, minimum: int) -> None:
    """Raise UserError when `value` is below `minimum`."""
    if value < minimum:
        raise UserError(f"{key}={value} is not possible: {key} is at least {minimum}")


def refuse_other_trainer(trainer: Mapping[str, Any]) -> None:
    """Raise UserError unless `_target_` is Lightning's trainer, and those inside it are parts of Lightning.

    A configuration names what is called: without this list a file of a stranger could call anything.
    """
    if trainer.get("_target_") not in TRAINERS:
        raise UserError(f"trainer._target_={trainer.get('_target_')} is no trainer: it is lightning.Trainer")
    for name in _targets({key: value for key, value in trainer.items() if key != "_target_"}):
        if not name.startswith(("lightning.", "torch.distributed.", "datetime.timedelta")):
            raise UserError(f"the trainer may not be made of {name}: name a class of lightning")


def _targets(node: Any) -> Iterator[str]:
    """Yield every `_target_` inside nested mappings and lists."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == "_target_":
                yield str(value)
            else:
                yield from _targets(value)
    elif isinstance(node, list | tuple):
        for item in node:
            yield from _targets(item)


def refuse_partial(trainer: Mapping[str, Any]) -> None:
    """Raise UserError for a trainer key that runs a part of the traces: it would pass for the whole."""
    for key, value in trainer.items():
        partial = key.startswith("limit_") or key in ("fast_dev_run", "overfit_batches")
        if partial and value is not None and value is not False:
            raise UserError(
                f"trainer.{key}={value} would learn from a part of the traces and keep it as whole: leave it"
                " out, and lower calibration.n for a short run"
            )


def check_silence(trainer: Mapping[str, Any]) -> None:
    """Raise UserError unless a trainer's `silence_s`, where it is written, is a number of seconds."""
    found = trainer.get("silence_s", 1)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 1 <= found < float("inf"):
        raise UserError(
            f"trainer.silence_s={found} is not possible: it is the seconds, at least 1, after which a process"
            " without a sign of life is given up, such as trainer.silence_s=600"
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
    tp_plan: Literal["auto"] | None = None
    attention: Literal["auto", "reference", "flash", "flex"] = "auto"
    prefill_chunk: int = 1024
    compiled: bool = False
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
        if self.tp_plan is not None:
            self._check_slices()

    def _check_slices(self) -> None:
        """Raise UserError where several processes cannot hold this model together."""
        if self.device_map is not None:
            raise UserError(
                "model.device_map spreads a model over the devices of one process, and model.tp_plan divides"
                " it among several: leave one of them out"
            )
        if self.source != "hub" or str(self.id).endswith(".gguf"):
            raise UserError(
                "model.tp_plan=auto divides safetensors weights of the hub or of a folder: use model=hf with"
                " model.id=..., or leave tp_plan out"
            )
        for key, usual in (("device", "auto"), ("compiled", False)):
            if getattr(self, key) != usual:
                raise UserError(
                    f"model.{key}={str(getattr(self, key)).lower()} is not possible with model.tp_plan=auto:"
                    " leave it out"
                )


TRACE_KEYS = ("n", "labels", "task")
TEXT_KEYS = ("source", "path", "tokens", "segment")


@dataclass(frozen=True)
class CalibrationSpec:
    """What a method learns from.

    `name` is what the choice amounts to: `traces` (n queries of the task, or of another label task), `text`
    (tokens of a corpus, cut into segments), or `auto`, which is whichever the method learns from.
    """

    name: Literal["auto", "traces", "text"] = "auto"
    n: int = 300
    labels: Literal["none", "gold", "wrong", "model"] = "none"
    task: str | None = None
    empty_prefix: bool = False
    keep_samples: bool = False
    source: str = "stdlib"
    path: str | None = None
    tokens: int = 24_000
    segment: int = 2048
    batch_size: int = 32

    def __post_init__(self) -> None:
        for key in ("n", "batch_size", "tokens"):
            at_least(f"calibration.{key}", getattr(self, key), 1)
        at_least("calibration.segment", self.segment, 16)

    def resolved(self, method: Any) -> CalibrationSpec:
        """Return what `auto` means for a method; UserError for a choice that the method cannot learn from."""
        wanted = method.learns_from
        if self.name not in ("auto", wanted) and method.needs_calibration:
            instead = (
                "calibration=traces" if wanted == "traces" else "calibration=stdlib, or calibration=text"
            )
            raise UserError(f"method={method.id} learns from {wanted}, not from {self.name}: use {instead}")
        size = self.batch_size
        if self.name == "auto" and wanted == "text":  # a segment is as long as many traces
            size = max(1, size // 8)
        return replace(self, name=wanted, batch_size=size)

    def learnt(self) -> dict[str, Any]:
        """Return the keys that decide what is learnt from."""
        return {key: getattr(self, key) for key in (TRACE_KEYS if self.name == "traces" else TEXT_KEYS)}


@dataclass(frozen=True)
class SamplingSpec:
    """How the answers of a task of questions are decoded: greedily at temperature 0.

    `samples`: answers to each question, each with a random stream of its own.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1

    def __post_init__(self) -> None:
        at_least("samples", self.samples, 1)
        if self.temperature < 0:
            raise UserError(f"temperature={self.temperature} is below 0: 0 decodes greedily")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} is no share: set it above 0 and up to 1")
        if self.top_p < 1 and self.temperature == 0:
            raise UserError(
                f"top_p={self.top_p} has no part in greedy decoding: set temperature=0.6, or leave it out"
            )
        if self.samples > 1 and self.temperature == 0:
            raise UserError(
                f"samples={self.samples} equal answers come from greedy decoding: set"
                " temperature=0.6, or one sample"
            )


@dataclass(frozen=True)
class LoggerSpec:
    """Where numbers go beside the run folder."""

    name: Literal["auto", "none", "csv", "wandb", "trackio", "mlflow", "tensorboard"] = "auto"
    project: str = "kvexp"
    entity: str | None = None
    mode: Literal["online", "offline"] | None = None
    artifact: bool = True

    def resolved(self, environment: Mapping[str, str] = os.environ) -> str:
        """Return the logger that is meant: `auto` is wandb where its key or a sweep is in the environment."""
        if self.name != "auto":
            return self.name
        return "wandb" if environment.get("WANDB_API_KEY") or environment.get("WANDB_SWEEP_ID") else "none"
