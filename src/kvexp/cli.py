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

from kvexp import advice, cluster, commandline, compose, launched, resolvers, schema, search
from kvexp.errors import UserError
from kvexp.failures import file_error, reason
from kvexp.logs import rank
from kvexp.plan import write_plan

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from kvexp.compose import Job
    from kvexp.schema import Settings

log = logging.getLogger(__name__)

FAILED, WRONG, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (the process's own by default) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if "--version" in words:
            print(f"kvexp {version('kvexp')}")
            return 0
        args = commandline.read(commandline.clean(words))
        if args.help or args.hydra_help or args.cfg or args.info or args.shell_completion:
            return _inspect(args)
        return _run(args)
    except UserError as error:
        return _say(str(error), WRONG)
    except KeyboardInterrupt:
        return _say("interrupted; the same command goes on from the last complete sample", INTERRUPTED)
    except BrokenPipeError:  # `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _say(reason(error), FAILED)


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
        write_plan(shlex.join(["python", "-m", "kvexp", *args.argv]), cells)
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
        return _say(reason(failure, cells), WRONG if isinstance(failure, UserError) else FAILED)
    return _finish_grid(cells, runner)


def _finish_grid(cells: Sequence[Settings], runner: Runner) -> int:
    from kvexp.run import finish_grid

    finish_grid(list({cell.cell: cell for cell in cells}.values()))
    if len(cells) > 1:
        log.info("all of it as a page, tables and figures: %s", _report_command(cells))
    for cell, error in runner.failures:
        said = reason(error, cells)
        _say(f"{cell}: {said}" if cell else said, FAILED)
    if not runner.failures:
        return 0
    skipped = f", {runner.skipped} were not started (fail_fast=true)" if runner.skipped else ""
    return _say(f"{len(runner.failures)} of {len(cells)} cells failed{skipped}", FAILED)


def _report_command(cells: Sequence[Settings]) -> str:
    """Return what shows the cells of a grid together."""
    words = ["python", "-m", "kvexp.report", *dict.fromkeys(str(cell.output_dir) for cell in cells)]
    presets = {cell.choices.get("experiment") for cell in cells}
    if len(presets) == 1 and (preset := presets.pop()) is not None:
        words += ["--experiment", preset]
    return shlex.join(words)


def _check(job: Job, jobs: Sequence[Job]) -> Settings:
    try:
        return schema.validate(job.config, job.config.hydra)
    except UserError as error:
        if len(jobs) == 1:
            raise
        shared = set.intersection(*(set(other.overrides) for other in jobs))
        cell = " ".join(word for word in job.overrides if word not in shared)
        raise UserError(f"in the cell {cell}: {error}") from error


def _inspect(args: argparse.Namespace) -> int:
    if not (args.hydra_help or args.shell_completion):
        with compose.opened(args) as composer:
            composer.single()
    with advice.given():
        _call_hydra(args, Runner())
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


def _say(sentence: str, code: int) -> int:
    print(f"kvexp: {' '.join(sentence.split())}", file=sys.stderr)
    return code


resolvers.register()  # for the processes of a launcher, which import this module to find `Runner`
