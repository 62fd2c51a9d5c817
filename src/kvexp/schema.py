"""What a configuration is made of, and the step from Hydra's nodes to `Settings`; torch comes later."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import yaml

from kvexp import advice, check, instantiate
from kvexp.budget import Budget
from kvexp.cell import cell_hash, identity
from kvexp.compose import conf_dir
from kvexp.errors import UserError, suggest
from kvexp.fits import refuse_unfit, sampling_of
from kvexp.repeat import command_of
from kvexp.specs import (
    CalibrationSpec,
    LoggerSpec,
    ModelSpec,
    SamplingSpec,
    at_least,
    check_silence,
    refuse_other_trainer,
    refuse_partial,
    slug,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from kvexp.methods.base import Method
    from kvexp.tasks.base import Task

SPLITS = ("test", "validation")
DATA_VARIABLE = "KVEXP_DATA_DIR"
_AS_WRITTEN = ("seed", "split", "limit", "fidelity", "batch_size", "resume", "fail_fast", "objective")
Spec = TypeVar("Spec")
GROUPS = ("model", "method", "task", "calibration", "trainer", "logger")


@dataclass
class Config:
    """The keys of a configuration as Hydra knows them; a group is a mapping with the keys of its file."""

    model: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)
    budget: Any = 1024
    seed: int = 0
    split: str = "test"
    limit: int | None = None
    fidelity: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1
    objective: str | None = None
    batch_size: int = 32
    resume: bool = True
    fail_fast: bool = False
    output_dir: str = "outputs"
    store_dir: str | None = None
    data_dir: str | None = None


@dataclass(frozen=True)
class Settings:
    """One cell, checked: everything a run needs to know, and nothing heavy."""

    model: ModelSpec
    method: Method
    task: Task
    calibration: CalibrationSpec
    calibration_task: Task | None  # whose traces are taken instead of the task's own
    trainer: dict[str, Any]
    logger: LoggerSpec
    sampling: SamplingSpec
    budget: Budget
    seed: int
    split: str
    limit: int | None
    fidelity: bool
    batch_size: int
    resume: bool
    fail_fast: bool
    objective: str | None  # the metric that a run returns to a search
    output_dir: Path
    store_dir: Path
    data_dir: str | None
    choices: dict[str, str]  # group: the choice, as folders and records name it
    config: dict[str, Any]  # resolved, plain
    command: str  # repeats this one cell
    cell: str

    @property
    def run_dir(self) -> Path:
        """The folder of this cell's files."""
        names = [self.choices[group] for group in ("task", "model", "method")]
        return self.output_dir.joinpath(*names, f"b{self.budget}", self.cell)

    def load_task(self, tokenizer: Any) -> Any:
        """Return the task's documents for a tokenizer."""
        return self.task.load(
            tokenizer, seed=self.seed, split=self.split, limit=self.limit, data_dir=self.data_dir
        )

    def config_text(self) -> str:
        """Return the text of config.yaml: in its first line the command that repeats this cell."""
        said = "" if "\n" in self.command else f"# {self.command}\n"
        return said + yaml.safe_dump(self.config, sort_keys=False)

    def remarks(self) -> list[str]:
        """Return what is allowed but worth a line before the run starts."""
        tokens = getattr(self.task, "context_tokens", None)
        if self.budget.rows is None or not isinstance(tokens, int) or self.budget.rows <= tokens:
            return []
        if self.method.needs_calibration:
            return [f"budget={self.budget} is more entries than the context has tokens, at most {tokens}"]
        return [f"budget={self.budget} exceeds the context of at most {tokens} tokens: everything fits"]


def validate(config: DictConfig, hydra: DictConfig) -> Settings:
    """Return the settings of a composed configuration.

    Args:
        config: the composed configuration, with or without its node `hydra`.
        hydra: that node; it tells which choices were made and by which overrides.

    Raises:
        UserError: unknown key, value that is not possible, planned task, method that cannot serve the task.
    """
    from omegaconf import OmegaConf

    keys = [str(key) for key in config if key != "hydra"]
    with advice.given():
        plain = OmegaConf.to_container(OmegaConf.masked_copy(config, keys), resolve=True)
    plain = cast(dict[str, Any], plain)
    chosen = hydra.runtime.choices
    choices = {group: str(chosen[group]) for group in (*GROUPS, "experiment") if chosen.get(group)}
    values = dataclasses.asdict(Config()) | check.fields(Config, plain, "", "the configuration")
    for group in GROUPS:
        _refuse_unusable(group, choices.get(group, ""), values.get(group) or {})
    return _settings(values, plain, choices, command_of(hydra))


def _settings(
    values: dict[str, Any], plain: dict[str, Any], choices: dict[str, str], command: str
) -> Settings:
    model = _spec(ModelSpec, "model", values, choices)
    method = instantiate.build("method", choices["method"], values["method"])
    calibration = _spec(CalibrationSpec, "calibration", values, choices).resolved(method)
    task = instantiate.build("task", choices["task"], values["task"])
    refuse_unfit(model, method, calibration, task, values["fidelity"], values["split"], choices)
    refuse_other_trainer(values["trainer"])
    refuse_partial(values["trainer"])
    check_silence(values["trainer"])
    _check_values(values)
    stated = getattr(task, "context_tokens", None)  # the length of every context, up to a few tokens
    budget = Budget.parse(values["budget"], stated)  # checked also where the method ignores it
    method.check_budget(budget)
    output_dir = Path(values["output_dir"]).expanduser().absolute()
    settings = Settings(
        model=model,
        calibration=calibration,
        logger=_spec(LoggerSpec, "logger", values, choices),
        sampling=sampling_of(values, task, choices["task"]),
        method=method,
        task=task,
        calibration_task=_calibration_task(calibration.task),
        trainer=values["trainer"],
        budget=budget if method.uses_budget else Budget(None),
        **{key: values[key] for key in _AS_WRITTEN},
        output_dir=output_dir,
        store_dir=Path(values["store_dir"] or output_dir / "store").expanduser().absolute(),
        data_dir=_data_dir(values["data_dir"]),
        choices={
            **choices,
            "calibration": _corpus(choices, calibration),
            "model": model.label,
            "task": _label(choices["task"], task),
        },
        config=plain,
        command=command,
        cell="",
    )
    return dataclasses.replace(settings, cell=cell_hash(identity(settings)))


def _spec(cls: type[Spec], group: str, values: Mapping[str, Any], choices: Mapping[str, str]) -> Spec:
    return cls(**check.fields(cls, values[group], group, f"{group} {choices[group]}"))


def _corpus(choices: Mapping[str, str], calibration: CalibrationSpec) -> str:
    """Name what the choice `auto` came to."""
    if choices["calibration"] != "auto":
        return choices["calibration"]
    return "traces" if calibration.name == "traces" else calibration.source


def _label(choice: str, task: Task) -> str:
    """Name a task that stands for many (lm-eval's) by the one that it runs."""
    name = getattr(task, "name", None)
    return f"{choice}-{slug(name)}" if isinstance(name, str) else choice


def _refuse_unusable(group: str, choice: str, node: Mapping[str, Any]) -> None:
    if not node:
        raise UserError(f"no {group} is chosen: write {group}=NAME (`python -m kvexp --help` lists them)")
    if node.get("planned"):
        raise UserError(
            f"{group}={choice} is planned and cannot run yet: {node.get('why', 'it is not built')}"
        )


def _check_values(values: Mapping[str, Any]) -> None:
    at_least("seed", values["seed"], 0)
    at_least("batch_size", values["batch_size"], 1)
    at_least("limit", 1 if values["limit"] is None else values["limit"], 1)
    split = values["split"]
    if split not in SPLITS:
        raise UserError(
            f"split={split} is not possible{suggest(split, SPLITS) or ':'} it is test or validation"
        )
    if not values["output_dir"]:
        raise UserError("output_dir= names nothing: write output_dir=outputs")


def _calibration_task(name: str | None) -> Task | None:
    if name is None:
        return None
    folder = conf_dir() / "task"
    names = [path.stem for path in folder.glob("*.yaml")]
    if name not in names:
        raise UserError(advice.no_choice("task", name, names))
    node = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
    _refuse_unusable("calibration.task", name, node)
    if not instantiate.target("task", name, node).shared_context:
        raise UserError(f"calibration.task={name} has no traces: name a label task, such as intents")
    return cast("Task", instantiate.build("task", name, node))


def _data_dir(written: str | None) -> str | None:
    found = written or os.environ.get(DATA_VARIABLE) or None
    if found is None:
        return None
    folder = Path(found).expanduser().absolute()
    if not folder.is_dir():
        raise UserError(f"data_dir={found} is not a folder" + ("" if written else f" (from {DATA_VARIABLE})"))
    return str(folder)
