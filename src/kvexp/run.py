"""One run is one straight pipe: load model and task, prepare, encode, query, measure, record."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from kvexp import cluster, instantiate, model
from kvexp.attention.options import Options, set_options
from kvexp.cell import identity
from kvexp.crew.crew import ALONE, Crew
from kvexp.crew.launch import Launch, crew_of
from kvexp.crew.slices import Slices
from kvexp.crew.wire import SILENCE
from kvexp.errors import UserError
from kvexp.evaluation import continuation, labels, questions, stock
from kvexp.evaluation.memory import memory_for
from kvexp.measure.answered import Answered, check_counters
from kvexp.measure.timing import Stopwatch
from kvexp.notes.llm import under_test
from kvexp.report import provenance
from kvexp.report.folder import ReadFolder, RunFolder
from kvexp.report.loggers import Guarded, Job, global_rank, make_logger
from kvexp.report.record import build_record, read_records
from kvexp.report.table import print_table
from kvexp.schema import Settings

log = logging.getLogger(__name__)
KINDS: dict[str, Callable[..., Answered]] = {
    "labels": labels.answer,
    "questions": questions.answer,
    "continuation": continuation.answer,
}


def run(settings: Settings) -> dict[str, Any]:
    """Run one cell and return its record; a complete cell is reported as done, an interrupted one goes on."""
    folder, launch = RunFolder(settings.run_dir), _launch(settings)
    if global_rank() > 0:  # a rank that helps with calibration and evaluation; it ends there
        _help(settings, folder, launch)
    ready = launch.joined() if launch and launch.together else contextlib.nullcontext(ALONE)
    with ready as crew, folder.lock():
        if settings.resume and folder.status == "complete":
            crew.broadcast(False)
            record = folder.record() or {}
            _refuse_changed(settings, record)
            log.info("this cell is complete: %s (resume=false runs it anew)", folder.path)
            if os.environ.get("WANDB_SWEEP_ID"):  # the sweep waits for a result under this run's own id
                _log(_started_logger(settings, folder), folder, record)
            return record
        if not settings.resume:
            folder.set_aside()
        return _recorded(settings, folder, launch, crew)


def _launch(settings: Settings) -> Launch | Slices | None:
    """Return how this cell's processes come together, None where there is one; lm-eval's tasks take one."""
    if settings.model.tp_plan is not None:
        cluster.check_slices(settings)
        return Slices(float(settings.trainer.get("silence_s", SILENCE)))
    if settings.task.kind == "lm_eval":
        return None
    trainer = functools.partial(instantiate.trainer, settings.trainer)
    launch = crew_of(settings.trainer, trainer, settings.command)
    if launch is not None and settings.model.device_map is not None:
        raise UserError(
            "model.device_map gives one process all devices, and this trainer starts several: set"
            " trainer.devices=1, or leave device_map out"
        )
    return launch


@contextlib.contextmanager
def _together(launch: Launch | Slices | None, crew: Crew) -> Iterator[Crew]:
    """Hand out a crew that is at work: `crew`, or the processes that are started now that there is work."""
    start = contextlib.nullcontext(crew) if launch is None or crew is not ALONE else launch.joined()
    with start as ready:
        ready.broadcast(True)
        yield ready


def _refuse_changed(settings: Settings, record: dict[str, Any]) -> None:
    """Raise UserError when data files that can be read without a model are not those of a complete record."""
    before, now = record["provenance"]["data_sha256"], settings.task.data_sha256(settings.data_dir)
    if before and now and before != now:
        raise UserError(
            f"this cell is complete, but its data changed since ({before[:12]} before, {now[:12]} now): start"
            " with resume=false, which runs the cell anew"
        )


def _help(settings: Settings, folder: RunFolder, launch: Launch | Slices | None) -> NoReturn:
    """Do this rank's share where there is any, and end; of the run folder only a shard is written."""
    if isinstance(launch, Slices):
        folder = ReadFolder(folder.path)
    if launch is not None:
        with launch.joined() as crew:
            if crew.broadcast():
                _answered(settings, _loaded(settings), folder, Stopwatch(), crew)
            crew.done()
    raise SystemExit(0)


def _recorded(
    settings: Settings, folder: RunFolder, launch: Launch | Slices | None, crew: Crew
) -> dict[str, Any]:
    """Run the cell between the start and the end of its record and its logger."""
    folder.write_config(settings.config_text())
    started = provenance.start_provenance(settings.command)
    choices = _choices(settings)
    logger = _started_logger(settings, folder)
    parts: dict[str, Any] = {"provenance": started}
    build = functools.partial(build_record, cell=settings.cell, choices=choices, identity=identity(settings))
    try:
        with _together(launch, crew) as ready:
            _pipe(settings, folder, parts, ready)
        record = build(**parts)
    except BaseException as error:
        reason = str(error) or type(error).__name__
        if isinstance(error, Exception):
            folder.write_record(build(error=reason, **parts))
        logger.finish("failed" if isinstance(error, Exception) else "preempted", reason)
        raise
    folder.write_record(record)
    _log(logger, folder, record)
    return record


def _choices(settings: Settings) -> dict[str, Any]:
    """Return what was chosen, as the record tells it: a method that learns nothing has no calibration."""
    learnt = settings.choices["calibration"] if settings.method.needs_calibration else None
    own = {"calibration": learnt, "budget": settings.budget.rows or "full", "seed": settings.seed}
    return {**settings.choices, **own}


def _started_logger(settings: Settings, folder: RunFolder) -> Guarded:
    logger = make_logger(**dataclasses.asdict(settings.logger))
    logger.start(Job(settings.cell, folder.path, settings.output_dir, _choices(settings), settings.config))
    return logger


def _log(logger: Guarded, folder: RunFolder, record: dict[str, Any]) -> None:
    logger.metrics(record)
    logger.samples(folder.samples())
    logger.finish("complete")


def _pipe(settings: Settings, folder: RunFolder, parts: dict[str, Any], crew: Crew) -> None:
    """The stages of a run; each leaves what it measured in `parts`, the sections of the record."""
    watch = Stopwatch(str(model.pick_device(settings.model.device)))
    with watch("total"):
        settings.task.check_data()
        loaded = _loaded(settings)
        answered = _answered(settings, loaded, folder, watch, crew)
    parts |= answered.sections(watch)
    parts["provenance"] = provenance.finish_provenance(
        parts["provenance"],
        device=str(loaded.device),
        threads=torch.get_num_threads(),
        model_sha256=loaded.sha256,
        data_sha256=answered.data_sha256,
        processes=crew.processes,
        task=answered.notes,
    )
    check_counters(settings.method, settings.budget, parts["cache"])


def _loaded(settings: Settings) -> Any:
    """Return the model, with its options set."""
    loaded = model.load_once(settings.model, needs_full_layer=settings.method.needs_full_layer)
    spec = settings.model
    set_options(loaded.model, Options(spec.attention, spec.prefill_chunk, spec.compiled))
    return loaded


def _answered(settings: Settings, loaded: Any, folder: RunFolder, watch: Stopwatch, crew: Crew) -> Answered:
    """Prepare the method, then answer the task in the way of its kind; ranks other than 0 end in there."""
    if settings.task.kind == "lm_eval":
        return stock.answer(settings, loaded, folder, watch)
    with under_test(loaded):
        task = settings.load_task(loaded.tokenizer)
    if crew.first:
        folder.check_inputs({"model_sha256": loaded.sha256, "data_sha256": task.data_sha256})
    shared = task if settings.task.shared_context else None
    memory = memory_for(settings, loaded, shared, folder, watch, crew)
    return KINDS[settings.task.kind](settings, loaded, task, memory, folder, watch, crew)


def finish_grid(cells: Sequence[Settings]) -> None:
    """Print one table of all cells of a grid, with paired differences to `full` where it is among them."""
    print_table([record for cell in cells for record in read_records(cell.run_dir)])
