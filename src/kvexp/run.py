"""One run is one straight pipe: load model and task, prepare, encode, query, measure, record."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import yaml

from kvexp import instantiate, model
from kvexp.attention.options import Options, set_options
from kvexp.budget import Budget
from kvexp.calibration.prepare import draw_traces, prepare
from kvexp.cell import identity
from kvexp.errors import UserError
from kvexp.measure.answered import Answered, check_counters
from kvexp.measure.decay import prefix_decay
from kvexp.measure.timing import Stopwatch
from kvexp.measure.usage import cache_usage
from kvexp.methods.baseline.full import Full
from kvexp.progress import track
from kvexp.prompt import Context
from kvexp.report import provenance
from kvexp.report.folder import RunFolder
from kvexp.report.loggers import Job, global_rank, make_logger
from kvexp.report.record import build_record, read_records
from kvexp.report.table import print_table
from kvexp.schema import Settings
from kvexp.tasks.adapter import KVLM, NOTHING
from kvexp.tasks.base import TaskSet
from kvexp.tasks.evaluate import LabelEvaluation, batched, by_length
from kvexp.tasks.scores import fidelity_summary, label_metrics
from kvexp.tasks.session import Session
from kvexp.tasks.stock import evaluate_stock

log = logging.getLogger(__name__)
DECAY_TOKENS, DECAY_QUERIES = 32, 32


def run(settings: Settings) -> dict[str, Any]:
    """Run one cell and return its record; a complete cell is reported as done, an interrupted one goes on."""
    folder = RunFolder(settings.run_dir)
    if global_rank() > 0:  # a rank that Lightning started to help with calibration; it ends there
        _help(settings, folder)
    with folder.lock():
        if settings.resume and folder.status == "complete":
            record = folder.record() or {}
            _refuse_changed(settings, record)
            log.info("this cell is complete: %s (resume=false runs it anew)", folder.path)
            return record
        if not settings.resume:
            folder.set_aside()
        return _recorded(settings, folder)


def _refuse_changed(settings: Settings, record: dict[str, Any]) -> None:
    """Raise UserError when data files that can be read without a model are not those of a complete record."""
    before, now = record["provenance"]["data_sha256"], settings.task.data_sha256(settings.data_dir)
    if before and now and before != now:
        raise UserError(
            f"this cell is complete, but its data changed since ({before[:12]} before, {now[:12]} now): start"
            " with resume=false, which runs the cell anew"
        )


def _help(settings: Settings, folder: RunFolder) -> NoReturn:
    """Calibrate this rank's share where there is any, and end; nothing of the run folder is touched."""
    complete = settings.resume and folder.status == "complete"
    if settings.method.needs_calibration and not complete:
        loaded, task, context = _loaded(settings)
        _prepare(settings, loaded, task, context)
    raise SystemExit(0)


def _recorded(settings: Settings, folder: RunFolder) -> dict[str, Any]:
    """Run the cell between the start and the end of its record and its logger."""
    folder.write_config(yaml.safe_dump(settings.config, sort_keys=False))
    started = provenance.start_provenance(settings.command)
    choices = {**settings.choices, "budget": settings.budget.rows or "full", "seed": settings.seed}
    logger = make_logger(**dataclasses.asdict(settings.logger))
    logger.start(Job(settings.cell, folder.path, settings.output_dir, choices, settings.config))
    parts: dict[str, Any] = {"provenance": started}
    build = functools.partial(build_record, cell=settings.cell, choices=choices, identity=identity(settings))
    try:
        _pipe(settings, folder, parts)
        record = build(**parts)
    except BaseException as error:
        reason = str(error) or type(error).__name__
        if isinstance(error, Exception):
            folder.write_record(build(error=reason, **parts))
        logger.finish("failed" if isinstance(error, Exception) else "preempted", reason)
        raise
    folder.write_record(record)
    logger.metrics(record)
    logger.samples(folder.samples())
    logger.finish("complete")
    return record


def _pipe(settings: Settings, folder: RunFolder, parts: dict[str, Any]) -> None:
    """The stages of a run; each leaves what it measured in `parts`, the sections of the record."""
    watch = Stopwatch(str(model.pick_device(settings.model.device)))
    with watch("total"):
        loaded, task, context = _loaded(settings)
        if task is None:
            answered = _stock_task(settings, loaded, folder, watch)
        else:
            answered = _label_task(settings, loaded, task, context, folder, watch)
    parts |= answered.sections(watch)
    parts["provenance"] = provenance.finish_provenance(
        parts["provenance"],
        device=str(loaded.device),
        threads=torch.get_num_threads(),
        model_sha256=loaded.sha256,
        data_sha256=answered.data_sha256,
    )
    check_counters(settings.method, settings.budget, parts["cache"])


def _loaded(settings: Settings) -> tuple[Any, TaskSet | None, Context]:
    """Return the model, the task's documents (None: lm-eval brings its own), and the context to encode."""
    loaded = model.load_once(settings.model, needs_full_layer=settings.method.needs_full_layer)
    set_options(loaded.model, Options(settings.model.attention, settings.model.prefill_chunk))
    if settings.task.kind == "lm_eval":
        return loaded, None, NOTHING
    task = settings.task.load(
        loaded.tokenizer,
        seed=settings.seed,
        split=settings.split,
        limit=settings.limit,
        data_dir=settings.data_dir,
    )
    context = Context(task.context.header, ()) if settings.calibration.empty_prefix else task.context
    longest = len(context) + max(len(document.query_ids) for document in task.documents) + task.max_new_tokens
    if longest > (loaded.context_limit or longest):
        log.warning(
            "texts of up to %d tokens exceed the %d that this model was made for: lower task.context_tokens",
            longest,
            loaded.context_limit,
        )
    return loaded, task, context


def _label_task(
    settings: Settings, loaded: Any, task: TaskSet, context: Context, folder: RunFolder, watch: Stopwatch
) -> Answered:
    """Prepare, encode, query and measure a task with labels."""
    folder.check_inputs({"model_sha256": loaded.sha256, "data_sha256": task.data_sha256})
    memory = None
    if settings.method.needs_calibration:
        with watch("prepare"):
            memory, pointer = _prepare(settings, loaded, task, context)
        folder.write_memory(pointer)
    session = Session(loaded, settings.method, memory, settings.budget, watch)
    _tell_empty(settings, context)
    with settings.method.attach(loaded.model, memory):
        cache = session.context(context)
        samples, decay = _answer(settings, session, task, context, folder)
    nominal = settings.budget.rows or max(cache.entries(), default=0)
    usage = cache_usage(loaded.model, cache, len(context), nominal)
    if memory is not None:
        usage |= {name: value for name, value in memory.manifest.items() if name.startswith("cost_")}
    fidelity = fidelity_summary(samples, decay) if settings.fidelity else None
    return Answered(label_metrics(samples), usage, fidelity, session.decoded, task.data_sha256)


def _tell_empty(settings: Settings, context: Context) -> None:
    """Warn when a method that chooses text by the budget is left without a demonstration."""
    if not context.chunks or not settings.method.uses_budget:
        return
    if len(settings.method.select(context, settings.budget)) <= len(context.header):
        log.warning("budget=%s holds no demonstration: the header alone is left, raise it", settings.budget)


def _stock_task(settings: Settings, loaded: Any, folder: RunFolder, watch: Stopwatch) -> Answered:
    """Let lm-eval run one of its own tasks over our adapter."""
    session = Session(loaded, settings.method, None, settings.budget, watch)
    with settings.method.attach(loaded.model):
        metrics, samples, digest = evaluate_stock(
            settings.task, KVLM(session, settings.batch_size), settings.limit, settings.seed
        )
    folder.check_inputs({"model_sha256": loaded.sha256, "data_sha256": digest})
    if not folder.resume([[sample["id"] for sample in samples]]):
        folder.append(samples)
    usage = cache_usage(loaded.model, session.context(NOTHING), 0, 0)
    return Answered(metrics, usage, None, session.decoded, digest)


def _prepare(
    settings: Settings, loaded: Any, task: TaskSet | None, context: Context
) -> tuple[Any, dict[str, Any]]:
    """Load or build the memory; return it with a pointer to where it lies."""
    source = task
    if settings.calibration_task is not None:
        source = settings.calibration_task.load(
            loaded.tokenizer, seed=settings.seed, data_dir=settings.data_dir
        )
    assert source is not None
    traces = draw_traces(settings.calibration, source, loaded, context, settings.seed)
    memory, where, built = prepare(
        settings.method,
        loaded,
        context,
        traces,
        settings.budget,
        settings.seed,
        settings.store_dir,
        settings.calibration.batch_size,
        functools.partial(instantiate.trainer, settings.trainer),
        settings.calibration.keep_samples,
    )
    return memory, {"folder": str(where), "built": built, "manifest": memory.manifest}


def _answer(
    settings: Settings, session: Session, task: TaskSet, context: Context, folder: RunFolder
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Score every document that is not on disk yet, a batch at a time; return all samples, and the decay."""
    size, documents = settings.batch_size, task.documents
    adapter = KVLM(session, size)
    reference = None
    if settings.fidelity:
        reference = KVLM(Session(session.loaded, Full(), None, Budget(None)), size)
    evaluation = LabelEvaluation(adapter, task, context, settings.seed, reference)
    evaluation.measure_bias(size)  # also when all samples are there: the record tells what this process did
    order = [document.id for document in documents]
    if not folder.settled(order):
        batches = batched(by_length(documents), size)
        done = folder.resume([[document.id for document in batch] for batch in batches])
        what = f"{settings.choices['task']} {settings.choices['method']}"
        for batch in track(batches[done:], what, unit="batches"):
            folder.append(evaluation.score(batch))
        folder.settle(order)
    decay = None
    if reference is not None and settings.method.family == "memory":
        asked = [evaluation.instances(batch) for batch in batched(documents[:DECAY_QUERIES], size)]
        decay = prefix_decay(((reference.batch(i), adapter.batch(i)) for i in asked), DECAY_TOKENS)
    return folder.samples(), decay


def finish_grid(cells: Sequence[Settings]) -> None:
    """Print one table of all cells of a grid, with paired differences to `full` where it is among them."""
    print_table([record for cell in cells for record in read_records(cell.run_dir)])
