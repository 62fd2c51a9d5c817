"""What stands behind the few public functions of `kvexp`: the same YAML files as the command line, no
Hydra run."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from kvexp import advice, check, compose, instantiate
from kvexp.budget import Budget
from kvexp.prompt import Context
from kvexp.specs import ModelSpec


def _node(group: str, name: str) -> dict[str, Any]:
    """Return the content of one YAML file, or raise UserError with the nearest name."""
    files = {path.stem: path for path in (compose.conf_dir() / group).glob("*.yaml")}
    if name not in files:
        raise advice.UserError(advice.no_choice(group, name, list(files)))
    return yaml.safe_load(files[name].read_text(encoding="utf-8"))


def method(name: str, knobs: dict[str, Any]) -> Any:
    """Return the method's dataclass instance."""
    return instantiate.build("method", name, {**_node("method", name), **knobs})


def model_spec(name: str, changes: dict[str, Any]) -> ModelSpec:
    """Return the description of a model."""
    node = {**_node("model", name), **changes}
    return ModelSpec(**check.fields(ModelSpec, node, "model", f"model {name}"))


def prepare(
    method: Any,
    model: Any,
    context: Context | Sequence[int],
    traces: Sequence[Sequence[int]],
    budget: Budget | int | str,
    seed: int,
) -> Any:
    """Run a method's calibration on this process's device."""
    import lightning

    from kvexp.calibration.module import Runner

    context = Context.of(context)
    budget = Budget.parse(budget, len(context))

    def trainer(**arguments: Any) -> lightning.Trainer:
        return lightning.Trainer(accelerator="auto", devices=1, **arguments)

    with tempfile.TemporaryDirectory(prefix="kvexp-") as folder:
        return method.prepare(model, Runner(context, traces, Path(folder), trainer, seed=seed), budget)
