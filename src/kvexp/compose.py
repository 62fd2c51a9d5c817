"""Hydra, called so that every mistake in a configuration comes back as one sentence before anything runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvexp import advice, commandline, grids
from kvexp.errors import UserError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

CONFIG_NAME = "config"
VERSION_BASE = "1.3"


def conf_dir() -> Path:
    """Return the folder of configuration files: inside the package (a wheel) or beside `src` (a checkout)."""
    here = Path(__file__).resolve().parent
    inside = here / "conf"
    return inside if inside.is_dir() else here.parent.parent / "conf"


@dataclass(frozen=True)
class Job:
    """One cell as Hydra composes it: the configuration, its node `hydra` too, and the overrides."""

    config: DictConfig
    overrides: tuple[str, ...]


class Composer:
    """Hydra's loader for one command line. Use it through `opened`."""

    def __init__(self, hydra: Any, args: argparse.Namespace) -> None:
        self._name = args.config_name or CONFIG_NAME
        self._loader = hydra.config_loader
        self._multirun = bool(args.multirun)
        self._check_choices(commandline.parse(args.overrides))
        self._written = self._spread(args.overrides)
        commandline.put(args, self._written)
        parsed = commandline.parse(self._written)
        self._swept = [item.input_line for item in parsed if item.is_sweep_override()]

    def single(self) -> Job:
        """Compose the command line as one run; values for a sweep are refused."""
        for written in self._swept:
            raise UserError(f"{written} has several values: add -m to run a grid, or quote them")
        return self._compose(self._written)

    def jobs(self) -> tuple[bool, list[Job]]:
        """Return whether the command line asks for a grid, and its cells.

        A sweeper that chooses its own values (Optuna) has no cells yet: the list then holds what they share.
        """
        cells = self.grid()
        if isinstance(cells, Job):
            return False, [cells]
        return True, [self.cell(cells, place) for place in range(len(cells))]

    def grid(self) -> list[list[str]] | Job:
        """Return the words of every cell of a grid, and the one job of a command line that asks for none."""
        from hydra.types import RunMode

        if not self._multirun and not self._swept:
            job = self.single()
            if job.config.hydra.mode != RunMode.MULTIRUN:
                return job
        master = self._guarded(self._written, RunMode.MULTIRUN).config
        if not self._multirun and master.hydra.mode != RunMode.MULTIRUN:
            return self.single()
        return self._cells(master)

    def cell(self, cells: Sequence[Sequence[str]], place: int) -> Job:
        """Compose one cell of a grid; a UserError names it."""
        with grids.named(cells[place], cells):
            return self._compose(cells[place])

    def _cells(self, master: DictConfig) -> list[list[str]]:
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

        hydra_node = master.hydra
        shared = list(hydra_node.overrides.hydra)
        written = list(hydra_node.overrides.task)
        plain = hydra_node.sweeper["_target_"].endswith((f".{BasicSweeper.__name__}", ".GridSweeper"))
        if not plain:
            fixed = [item.input_line for item in commandline.parse(written) if not item.is_sweep_override()]
            return [shared + fixed]
        sweeper = hydra_node.sweeper
        found = grids.cells(
            self._with_loader, sweeper.get("params") or {}, sweeper.get("grid") or (), written
        )
        for item in self._with_loader(written) if not found else ():
            if item.is_sweep_override() and not list(item.sweep_string_iterator()):
                raise UserError(f"{item.input_line} stands for no value: write the values, key=a,b")
        self._refuse_grids_of_grids(written)
        return [shared + cell for cell in found]

    def _refuse_grids_of_grids(self, written: Sequence[str]) -> None:
        from hydra.types import RunMode

        for item in self._with_loader(written):
            if item.key_or_group != "experiment" or not item.is_sweep_override():
                continue
            for name in item.sweep_string_iterator():
                sweeper = self._guarded([f"experiment={name}"], RunMode.MULTIRUN).config.hydra.sweeper
                if sweeper.get("params") or sweeper.get("grid"):
                    raise UserError(f"experiment={name} is a grid of its own: give it a command of its own")

    def _spread(self, written: Sequence[str]) -> list[str]:
        """Return the words, with knobs of what a preset chooses made sweeps over one value."""
        from hydra.types import RunMode

        parsed = commandline.parse(written)
        knobs = {
            item.input_line
            for item in parsed
            if "." in item.key_or_group and not item.is_hydra_override() and not item.is_sweep_override()
        }
        preset = any(item.key_or_group == "experiment" for item in parsed)
        if not preset or not knobs or "hydra.mode=RUN" in written:
            return list(written)
        hydra = self._guarded([word for word in written if word not in knobs], RunMode.MULTIRUN).config.hydra
        if hydra.mode != RunMode.MULTIRUN:
            return list(written)
        params, lines = hydra.sweeper.get("params") or {}, hydra.sweeper.get("grid") or ()
        return commandline.spread(written, grids.keys(self._with_loader, params, lines))

    def _with_loader(self, written: Sequence[str]) -> list[Override]:
        """Parse with the loader at hand, which `glob(*)` needs to find its choices."""
        from hydra.core.override_parser.overrides_parser import OverridesParser

        commandline.parse(written)
        return OverridesParser.create(config_loader=self._loader).parse_overrides(list(written))

    def _compose(self, written: Sequence[str]) -> Job:
        from hydra.types import RunMode

        return self._guarded(written, RunMode.RUN)

    def _guarded(self, written: Sequence[str], mode: Any) -> Job:
        from hydra.types import RunMode

        with advice.given(self.options), self._readable():
            config = self._loader.load_configuration(
                config_name=self._name,
                overrides=list(written),
                run_mode=mode,
                from_shell=True,
                validate_sweep_overrides=mode == RunMode.RUN,
            )
        return Job(config, tuple(written))

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Name the file that is not UTF-8, which the error does not."""
        try:
            yield
        except UnicodeDecodeError as error:
            sources = self._loader.get_search_path().get_path()
            folders = [Path(str(one.path).removeprefix("file://")) for one in sources]
            for path in (path for folder in folders for path in folder.rglob("*.yaml")):
                try:
                    path.read_text(encoding="utf-8")
                except UnicodeDecodeError:
                    raise UserError(f"{path} is not UTF-8: save it in this encoding") from error
            raise

    def options(self, group: str) -> list[str]:
        """Return the choices of a group over the whole search path; none when there is no such group.

        Those of presets in folders are named with the folder: `asm/fig3`.
        """
        from hydra.core.object_type import ObjectType

        names = list(self._loader.get_group_options(group, ObjectType.CONFIG))
        for folder in self._loader.get_group_options(group, ObjectType.GROUP) if names else ():
            below = self._loader.get_group_options(f"{group}/{folder}", ObjectType.CONFIG)
            names += [f"{folder}/{name}" for name in below]
        return sorted(names)

    def _check_choices(self, parsed: Sequence[Override]) -> None:
        for override in parsed:
            advice.check_part(override)
            group = override.key_or_group
            options = self.options(group) if not override.is_delete() and "." not in group else []
            if options and not override.is_hydra_override():
                advice.check_choice(group, override, options)


@contextmanager
def opened(args: argparse.Namespace) -> Iterator[Composer]:
    """Open Hydra on the configuration folder and the user's own ones; close it again on exit."""
    from hydra import version
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.global_hydra import GlobalHydra

    from kvexp import resolvers

    resolvers.register()
    version.setbase(VERSION_BASE)
    search_path = create_config_search_path(str(args.config_path or conf_dir()))
    if args.config_dir is not None:
        folder = f"file://{Path(args.config_dir).resolve()}"
        search_path.prepend(provider="command-line", path=folder, anchor=SearchPathQuery(provider="schema"))
    GlobalHydra.instance().clear()
    try:
        yield Composer(Hydra.create_main_hydra2(task_name="kvexp", config_search_path=search_path), args)
    finally:
        GlobalHydra.instance().clear()
