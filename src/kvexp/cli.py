"""The command line: compose, check, run. Nothing heavy is imported until all of it has been checked.

Exit codes: 0 all is done, 1 a run failed, 2 the command line was wrong. A mistake is one line on stderr.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

from kvexp import advice, cluster, commandline, compose, grids, launched, resolvers, schema, search
from kvexp.ended import FAILED, WRONG, ended, say
from kvexp.errors import UserError
from kvexp.failures import CHECK_FOLDERS, file_error, reason
from kvexp.files import tell
from kvexp.logs import rank
from kvexp.plan import write_plans

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from kvexp.compose import Job
    from kvexp.schema import Settings

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (the process's own by default) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return ended(
        lambda: _command(words),
        CHECK_FOLDERS,
        interrupted="interrupted; the same command goes on from the last complete sample",
    )


def _command(words: Sequence[str]) -> int:
    if "--version" in words:
        print(f"kvexp {version('kvexp')}")
        return 0
    args = commandline.read(commandline.clean(words))
    if args.help or args.hydra_help or args.cfg or args.info or args.shell_completion:
        return _inspect(args)
    return _run(args)


def settings_of(words: Sequence[str]) -> list[Settings]:
    """Return the checked settings of a command line's cells without running them.

    Raises:
        UserError: the command line is wrong.
    """
    return _plan(commandline.read(commandline.clean(words))).cells


@dataclass(frozen=True)
class Plan:
    """What a command line asks for: its cells, whether they are a grid, and what starts and chooses them."""

    cells: list[Settings]
    is_grid: bool
    launcher: str
    chosen_first: bool  # false: a sweeper chooses the cells while it runs


class Runner:
    """The function that Hydra calls once for each cell; it keeps what failed for the end."""

    def __init__(self, fail_fast: bool = False) -> None:
        self.failures: list[tuple[str, Exception]] = []
        self.cells: list[Settings] = []
        self.skipped = 0
        self._fail_fast = fail_fast
        self._process = socket.gethostname(), os.getpid()

    def __call__(self, config: DictConfig) -> Any:
        """Run one cell; in a process that a launcher started, raise what failed, for the launcher to know."""
        from hydra.core.hydra_config import HydraConfig

        if self._fail_fast and self.failures:
            self.skipped += 1
            return None
        try:
            settings = schema.validate(config, cast("DictConfig", HydraConfig.get()))
            cluster.check_rank(settings, rank())
            for line in (f"run folder: {settings.run_dir}", *settings.remarks()):
                log.info(line)
            from kvexp.run import run

            self.cells.append(settings)
            record = run(settings)
            return search.objective_of(record, settings.objective) if settings.objective else None
        except SystemExit as end:  # a rank that has done its share; a launcher waits for what it returns
            if self._is_here or end.code:
                raise
            return None
        except Exception as error:
            log.error("the run failed", exc_info=True)
            if not self._is_here:
                raise
            self.failures.append((" ".join(HydraConfig.get().overrides.task), error))
            return None

    def note(self, overrides: str, reason: str) -> None:
        """Keep the failure of a cell that ran in another process."""
        self.failures.append((overrides, UserError(reason)))

    @property
    def _is_here(self) -> bool:
        return (socket.gethostname(), os.getpid()) == self._process


def _plan(args: argparse.Namespace) -> Plan:
    with compose.opened(args) as composer:
        is_grid, jobs = composer.jobs()
        cells = [_check(job, jobs) for job in jobs]
        hydra = jobs[0].config.hydra
        listed = str(hydra.sweeper["_target_"]).endswith((".BasicSweeper", ".GridSweeper"))
        if is_grid:
            cluster.check_launcher(cells[0], hydra)
        if is_grid and not listed:
            search.check_search(cells[0])
    return Plan(cells, is_grid, cluster.launcher_of(hydra), listed)


def _run(args: argparse.Namespace) -> int:
    plan = _plan(args)
    is_grid, cells = plan.is_grid, plan.cells
    if is_grid and plan.chosen_first and rank() == 0:
        write_plans(shlex.join(["python", "-m", "kvexp", *args.argv]), cells)
        folders = " and ".join(dict.fromkeys(str(cell.output_dir) for cell in cells))
        tell(f"kvexp: a grid of {len(cells)} cells, below {folders}; with --cfg job it is listed and not run")
    began = time.time()
    runner = Runner(fail_fast=cells[0].fail_fast)
    submits = is_grid and plan.launcher in ("SlurmLauncher", "LocalLauncher")
    try:
        with launched.waited_for(runner.note) if submits else nullcontext():
            _call_hydra(args, runner)
    except Exception as error:  # a cell failed in a process that a launcher started, or the launcher did
        if file_error(error) is None:
            log.error("the launcher failed", exc_info=True)
        runner.failures.append(("", error))
    if is_grid and not plan.chosen_first:
        code = _finish_grid(runner.cells, runner)
        for line in search.chosen(cells[0].output_dir, began, cells[0].command):
            print(line)
        return code
    if is_grid:
        return _finish_grid(cells, runner)
    for _, failure in runner.failures:
        return say(reason(failure, cells), WRONG if isinstance(failure, UserError) else FAILED)
    return _finish_grid(cells, runner)


def _finish_grid(cells: Sequence[Settings], runner: Runner) -> int:
    from kvexp.run import finish_grid

    finish_grid(list({cell.cell: cell for cell in cells}.values()))
    if len(cells) > 1:
        log.info("all of it as a page, tables and figures: %s", _report_command(cells))
    for cell, error in runner.failures:
        said = reason(error, cells)
        say(f"{cell}: {said}" if cell else said, FAILED)
    if not runner.failures:
        return 0
    skipped = f", {runner.skipped} were not started (fail_fast=true)" if runner.skipped else ""
    return say(f"{len(runner.failures)} of {len(cells)} cells failed{skipped}", FAILED)


def _report_command(cells: Sequence[Settings]) -> str:
    """Return what shows the cells of a grid together."""
    words = ["python", "-m", "kvexp.report", *dict.fromkeys(str(cell.output_dir) for cell in cells)]
    presets = {cell.choices.get("experiment") for cell in cells}
    if len(presets) == 1 and (preset := presets.pop()) is not None:
        words += ["--experiment", preset]
    return shlex.join(words)


def _check(job: Job, jobs: Sequence[Job]) -> Settings:
    with grids.named(job.overrides, [other.overrides for other in jobs]):
        return schema.validate(job.config, job.config.hydra)


def _inspect(args: argparse.Namespace) -> int:
    """Show what Hydra knows of the command line; of a grid its first cell's configuration, then all cells."""
    cells: Sequence[Sequence[str]] = ()
    if not (args.hydra_help or args.shell_completion):
        with compose.opened(args) as composer:
            found = composer.grid() if args.cfg else composer.single()
            if not isinstance(found, compose.Job):
                cells = found
                commandline.put(args, composer.cell(cells, 0).overrides)
    with advice.given():
        _call_hydra(args, Runner())
    if cells and not args.package:
        print("\n".join(grids.listed(cells)))
    return 0


def _call_hydra(args: argparse.Namespace, runner: Runner) -> None:
    import hydra

    entry = hydra.main(
        config_path=str(compose.conf_dir()),
        config_name=compose.CONFIG_NAME,
        version_base=compose.VERSION_BASE,
    )(runner)
    with _words(args.argv):
        try:
            entry()
        except SystemExit as end:
            if end.code:
                raise


@contextmanager
def _words(words: Sequence[str]) -> Iterator[None]:
    """Set `sys.argv`, which Hydra reads and Lightning repeats for its ranks, and have Hydra raise errors."""
    before, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [before[0], *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = before
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


resolvers.register()  # for the processes of a launcher, which import this module to find `Runner`
