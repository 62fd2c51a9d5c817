"""The command line that runs one cell again, also where a file made a grid of it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig

_NO_GRID = {"params": "null", "grid": "[]"}  # of a sweeper, for a launcher that takes a grid of one cell
_ALONE = ("hydra.mode=RUN", *(f"hydra.sweeper.{key}={none}" for key, none in _NO_GRID.items()))


def command_of(hydra: DictConfig) -> str:
    """Return the command of the cell whose node `hydra` this is."""
    folders = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
    words = [word for folder in folders for word in ("--config-dir", folder)]
    return shlex.join(["python", "-m", "kvexp", *words, *hydra.overrides.task, *_alone(hydra)])


def _alone(hydra: DictConfig) -> list[str]:
    """Return what makes one cell of a grid that comes from a file a run of its own."""
    chosen = hydra.runtime.choices
    if not any(chosen.get(group) for group in ("experiment", "sweep")):
        return []
    if said := [word for word in hydra.overrides.hydra if word in _ALONE]:
        return said
    if str(hydra.mode).rpartition(".")[2] != "MULTIRUN":
        return []
    if not chosen.get("cluster"):
        return ["hydra.mode=RUN"]
    return [f"hydra.sweeper.{key}={none}" for key, none in _NO_GRID.items() if key in hydra.sweeper]
