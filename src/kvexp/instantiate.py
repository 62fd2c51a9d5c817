"""The one place where configuration becomes objects.

A method or task is a dataclass named by `_target_`: its fields are its knobs and its annotations their types,
so that no second schema has to be kept. A trainer is whatever its `_target_` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib import import_module
from typing import Any, get_type_hints

import yaml

from kvexp import check
from kvexp.advice import no_choice
from kvexp.compose import conf_dir
from kvexp.errors import UserError
from kvexp.specs import OWN_TRAINER_KEYS

_BASES = {
    "method": "kvexp.methods.base.Method",
    "task": "kvexp.tasks.base.Task",
    "notes": "kvexp.notes.units.NotesKind",
}


def build(group: str, choice: str, node: Mapping[str, Any]) -> Any:
    """Return the dataclass instance that `node` describes.

    Args:
        group: "method" or "task", or a folder of their parts ("notes").
        choice: the name of the YAML file in that group, for the sentences.
        node: plain values, `_target_` among them.

    Raises:
        UserError: unknown knob, wrong type, wrong choice, value out of range, or no usable `_target_`.
    """
    owner = f"{group} {choice}"
    cls = target(group, choice, node)
    values = {key: value for key, value in node.items() if key != "_target_"}
    for key, part in _nested(cls).items():
        if key in values:
            values[key] = _part(getattr(part, "conf_group", group), f"{group}.{key}", values[key])
    return cls(**check.fields(cls, values, group, owner))


def _nested(cls: type) -> dict[str, type]:
    """Return the fields of `cls` that hold another dataclass, such as the base of a method, and its type.

    It is of the same group, or of the one that its type names as `conf_group`.
    """
    hints = get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    return {name: hints[name] for name in names if dataclasses.is_dataclass(hints[name])}


def _part(group: str, key: str, given: Any) -> Any:
    """Build a part of a composed choice from its name, or from {name: NAME, knob: value}."""
    if dataclasses.is_dataclass(given):
        return given
    knobs = {"name": given} if isinstance(given, str) else dict(given) if isinstance(given, Mapping) else {}
    name = knobs.pop("name", None)
    files = {path.stem: path for path in (conf_dir() / group).glob("*.yaml")}
    if not isinstance(name, str):
        raise UserError(f"{key} is the name of a choice of {group}, or {{name: NAME, knob: value}}")
    if name not in files:
        raise UserError(no_choice(key, name, list(files)))
    return build(group, name, {**yaml.safe_load(files[name].read_text(encoding="utf-8")), **knobs})


def target(group: str, choice: str, node: Mapping[str, Any]) -> Any:
    """Return the dataclass that `node` names; a UserError when it names none."""
    where, name = f"conf/{group}/{choice}.yaml", node.get("_target_")
    if not isinstance(name, str):
        raise UserError(f"{where} names no class: it needs a line such as `_target_: package.module.Class`")
    try:
        cls = _named(name)
    except Exception as error:  # whatever the user's module raises as it is imported
        raise UserError(f"{where} names {name}, which cannot be imported: {_first_line(error)}") from error
    if not isinstance(cls, type):
        raise UserError(f"{where} names {name}, which is no class")
    if not dataclasses.is_dataclass(cls):
        raise UserError(f"{where} names {name}, which is no dataclass: a {group} is one")
    if group in _BASES and not issubclass(cls, _named(_BASES[group])):
        raise UserError(f"{where} names {name}, which is no {group}: it subclasses {_BASES[group]}")
    return cls


def trainer(node: Mapping[str, Any], **extra: Any) -> Any:
    """Return the `lightning.Trainer` of a trainer configuration; `extra` are arguments set in code.

    The keys that are the project's own (`kvexp.specs.OWN_TRAINER_KEYS`) are not handed on.

    Raises:
        UserError: Lightning refuses an argument; the sentence is Lightning's.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        given = {key: value for key, value in node.items() if key not in OWN_TRAINER_KEYS}
        return instantiate(given, **extra, _convert_="all")
    except InstantiationException as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise UserError(f"the trainer cannot be made: {reason}") from error


def _named(path: str) -> Any:
    # Hydra's get_class does the same, but logs its own lines before it raises.
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
