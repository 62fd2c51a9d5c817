"""What the configuration files can ask code for: `${run_dir:}`, `${run_subdir:}` and `${help_text:}`."""

from __future__ import annotations

from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from kvexp import helptext, schema
from kvexp.errors import UserError

_NO_CELL = "outputs/no_cell"


def register() -> None:
    """Make the schema and the resolvers known to Hydra; calling it again changes nothing."""
    ConfigStore.instance().store(name="schema", node=schema.Config)
    for name, function in (("run_dir", _run_dir), ("run_subdir", _run_subdir), ("help_text", _help_text)):
        OmegaConf.register_new_resolver(name, function, replace=True)


def _run_dir(*, _root_: Any) -> str:
    settings = _settings(_root_)
    return str(settings.run_dir) if settings else _NO_CELL


def _run_subdir(*, _root_: Any) -> str:
    settings = _settings(_root_)
    return str(settings.run_dir.relative_to(settings.output_dir)) if settings else _NO_CELL


def _settings(root: Any) -> schema.Settings | None:
    """Return None for what is only shown (`--cfg`) or fails anyway (a sweeper's own wrong value)."""
    try:
        return schema.validate(root, root.hydra)
    except UserError:
        return None


def _help_text(*, _root_: DictConfig) -> str:
    return helptext.text(_root_.hydra)
