"""Every cell of every preset, without a composition for each, since composing is slow in Hydra.

Hydra composes each preset once. A cell's choices of groups are then put in as their files stand, and its
values are set as Hydra sets those of a command line. `tests/test_presets.py` holds cells against Hydra's own
way.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from omegaconf import OmegaConf

from kvexp import commandline, compose, grids, schema
from kvexp.compose import conf_dir
from kvexp.schema import Settings

FOLDER = conf_dir() / "experiment"
GROUPS = ("model", "method", "task", "calibration")
PRESETS = tuple(
    str(path.relative_to(FOLDER).with_suffix(""))
    for path in sorted(FOLDER.rglob("*.yaml"))
    if path.parent != FOLDER
)


def node(name: str) -> dict[str, Any]:
    """The preset's file."""
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def first_line(name: str) -> str:
    """What the preset says it is."""
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return next(line[2:] for line in lines if line.startswith("# ") and not line.startswith("# @"))


def words_of(name: str) -> list[list[str]]:
    """The overrides of every cell."""
    sweeper = node(name)["hydra"]["sweeper"]
    return grids.cells(commandline.parse, sweeper.get("params") or {}, sweeper["grid"], [])


@contextmanager
def composer() -> Iterator[Any]:
    """Compose cells of presets: `settings(name, words)`."""
    from hydra.types import RunMode

    with compose.opened(commandline.read([])) as opened:

        @cache
        def base(name: str) -> tuple[dict[str, Any], Any]:
            config = opened._guarded([f"experiment={name}"], RunMode.MULTIRUN).config
            plain = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
            return OmegaConf.to_container(plain), config.hydra

        def settings(name: str, words: list[str]) -> Settings:
            shared, hydra = base(name)
            config, chosen = copy.deepcopy(shared), dict(hydra.runtime.choices)
            parsed = [_parsed(word) for word in words]
            for override in sorted(parsed, key=lambda one: one.key_or_group not in GROUPS):
                key, value = override.key_or_group, override.value()
                if key in GROUPS:
                    config[key], chosen[key] = copy.deepcopy(_file(key, value)), value
                else:
                    *path, last = key.split(".")
                    place = config
                    for part in path:
                        place = place[part]
                    assert last in place, f"{key} is no key"
                    place[last] = getattr(value, "text", value)
            runtime = SimpleNamespace(choices=chosen, config_sources=[])
            node = SimpleNamespace(
                runtime=runtime, overrides=SimpleNamespace(task=words, hydra=["hydra.mode=RUN"])
            )
            return schema.validate(OmegaConf.create(config), node)

        yield settings


@cache
def _parsed(word: str) -> Any:
    return commandline.parse([word])[0]


@cache
def _file(group: str, choice: str) -> dict[str, Any]:
    return yaml.safe_load((conf_dir() / group / f"{choice}.yaml").read_text(encoding="utf-8"))


def path_of(name: str) -> Path:
    """The preset's file."""
    return FOLDER / f"{name}.yaml"
