"""The `prepare` stage: what a method learns before it meets a context, loaded by fingerprint or built."""

from __future__ import annotations

import functools
from typing import Any

from kvexp import instantiate
from kvexp.calibration.prepare import draw_segments, draw_traces, prepare
from kvexp.crew.crew import ALONE, Crew
from kvexp.evaluation.labels import context_of
from kvexp.measure.timing import Stopwatch
from kvexp.prompt import Context
from kvexp.report.folder import RunFolder
from kvexp.schema import Settings


def memory_for(
    settings: Settings,
    loaded: Any,
    task: Any,
    folder: RunFolder | None,
    watch: Stopwatch,
    crew: Crew = ALONE,
) -> Any:
    """Return the memory of a method that learns something, else what its contexts share, or None.

    `task` gives the traces (None: it is loaded where they are wanted); `folder` gets a pointer to the memory.
    Every rank of a crew takes part, and has the same in the end.
    """
    if not settings.method.needs_calibration:
        return settings.method.opened(loaded.model, settings.store_dir, loaded.sha256)
    with watch("prepare"):
        memory, pointer = _prepared(settings, loaded, task, crew)
    if folder is not None and crew.first:
        folder.write_memory(pointer)
    return memory


def _prepared(settings: Settings, loaded: Any, task: Any, crew: Crew) -> tuple[Any, dict[str, Any]]:
    spec = settings.calibration
    if spec.name == "text":
        context, items = Context((), ()), draw_segments(spec, loaded, settings.data_dir)
    else:
        task = task or settings.load_task(loaded.tokenizer)
        context = context_of(settings, task)
        source = task
        if settings.calibration_task is not None:
            source = settings.calibration_task.load(
                loaded.tokenizer, seed=settings.seed, data_dir=settings.data_dir
            )
        items = draw_traces(spec, source, loaded, context, settings.seed)
    memory, where, built = prepare(
        settings.method,
        loaded,
        context,
        items,
        settings.budget,
        settings.seed,
        settings.store_dir,
        spec.batch_size,
        functools.partial(instantiate.trainer, settings.trainer),
        spec.keep_samples,
        crew,
    )
    return memory, {"folder": str(where), "built": built, "manifest": memory.manifest}
