"""The configuration files: each says what it is, agrees with its dataclass, and composes."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvexp import helptext, instantiate
from kvexp.cli import settings_of
from kvexp.compose import conf_dir
from kvexp.errors import UserError
from kvexp.schema import GROUPS, Config
from kvexp.specs import TEXT_KEYS, TRACE_KEYS, CalibrationSpec, LoggerSpec, ModelSpec

CONF = conf_dir()
FILES = sorted(CONF.rglob("*.yaml"))
CHOICES = [path for path in FILES if path.parent.name in GROUPS]
NEEDED = {"hf": ["model.id=a/b"], "lm_eval": ["method=full", "task.name=some_task"]}
for corpus in (CONF / "calibration").glob("*.yaml"):
    if yaml.safe_load(corpus.read_text())["name"] == "text":
        NEEDED[corpus.stem] = ["method=triattention"]
for method in (CONF / "method").glob("*.yaml"):
    if instantiate.build("method", method.stem, yaml.safe_load(method.read_text())).needs_query:
        NEEDED[method.stem] = ["task=state_change"]  # the default task asks many on one context
for task in (CONF / "task").glob("*.yaml"):
    node = yaml.safe_load(task.read_text())
    if "_target_" in node and not instantiate.target("task", task.stem, node).shared_context:
        NEEDED[task.stem] = ["method=full", *NEEDED.get(task.stem, [])[1:]]  # the default method needs one


def _name(path: Path) -> str:
    return str(path.relative_to(CONF))


def _load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _plain_defaults(cls: type) -> dict[str, Any]:
    instance = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(cls)
    }
    return {key: _written(value) for key, value in instance.items()}


def _written(value: Any) -> Any:
    """A default as a file writes it; a part of a composed method is named."""
    if isinstance(value, tuple):
        return list(value)
    return value.id if dataclasses.is_dataclass(value) else value


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_the_first_line_says_what_the_file_is(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert 5 < len(helptext.describe(path)) <= 130


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.parent.name in ("method", "task", "notes")], ids=_name
)
def test_methods_and_tasks_show_every_knob_with_its_default(path: Path) -> None:
    node = _load(path)
    if node.get("planned"):
        assert set(node) == {"name", "planned", "why"}
        return
    module, _, name = node.pop("_target_").rpartition(".")
    cls = getattr(import_module(module), name)
    assert cls.id == path.stem
    assert node == _plain_defaults(cls)


@pytest.mark.parametrize("path", [p for p in CHOICES if p.parent.name == "model"], ids=_name)
def test_models_show_every_key(path: Path) -> None:
    node = _load(path)
    assert set(node) == {field.name for field in dataclasses.fields(ModelSpec)}
    assert node["name"] == path.stem


def test_calibration_and_loggers_agree_with_their_dataclass() -> None:
    defaults = dataclasses.asdict(CalibrationSpec())
    assert _load(CONF / "calibration/auto.yaml") == defaults
    for path in (CONF / "calibration").glob("*.yaml"):
        node = _load(path)
        assert CalibrationSpec(**node).name == node["name"]
        shown = {"traces": TRACE_KEYS, "text": TEXT_KEYS, "auto": (*TRACE_KEYS, *TEXT_KEYS)}[node["name"]]
        more = {"name", "batch_size"} | (
            {"empty_prefix", "keep_samples"} if node["name"] != "text" else set()
        )
        assert set(node) == {*shown, *more}
        same = set(node) - {"name", "batch_size", "source"}
        assert {key: node[key] for key in same} == {key: defaults[key] for key in same}
    assert _load(CONF / "logger/auto.yaml") == dataclasses.asdict(LoggerSpec())
    for name in ("none", "csv", "wandb", "trackio", "mlflow", "tensorboard"):
        node = _load(CONF / f"logger/{name}.yaml")
        assert LoggerSpec(**node).name == name


def test_the_main_file_shows_every_key_with_its_default() -> None:
    node = _load(CONF / "config.yaml")
    groups = [next(iter(item)) for item in node.pop("defaults") if isinstance(item, dict)]
    assert set(GROUPS) <= set(groups)
    shown = {field.name: field.default for field in dataclasses.fields(Config) if field.name not in GROUPS}
    assert node == shown
    assert {key for key, _, note in helptext.keys(CONF / "config.yaml") if note} == set(shown)


@pytest.mark.parametrize("path", CHOICES, ids=_name)
def test_every_choice_composes(path: Path) -> None:
    words = [f"{path.parent.name}={path.stem}", *NEEDED.get(path.stem, [])]
    if _load(path).get("planned"):
        with pytest.raises(UserError, match="is planned and cannot run yet"):
            settings_of(words)
        return
    if _load(path).get("full_attention") is False:
        with pytest.raises(UserError, match=f"every layer of model={path.stem} has a sliding window"):
            settings_of(words)
        words.append("method=full")
    (settings,) = settings_of(words)
    if path.name != "auto.yaml" or path.parent.name != "calibration":  # named by what it came to
        assert settings.choices[path.parent.name].startswith(path.stem)


@pytest.mark.parametrize("path", sorted((CONF / "experiment").glob("*.yaml")), ids=_name)
def test_every_experiment_composes(path: Path) -> None:
    name = path.relative_to(CONF / "experiment").with_suffix("")
    assert settings_of([f"experiment={name}"])


@pytest.mark.parametrize("path", sorted((CONF / "debug").glob("*.yaml")), ids=_name)
def test_debugging_is_small_and_apart(path: Path) -> None:
    (settings,) = settings_of([f"debug={path.stem}"])
    assert settings.limit is not None and settings.limit <= 8
    assert settings.output_dir.name == "debug" and settings.logger.name == "none"
