"""Label tasks: one context, encoded once, and every document a query on it."""

from __future__ import annotations

import logging
from typing import Any

from kvexp.crew.crew import ALONE, Crew
from kvexp.evaluation.known import known_answers
from kvexp.evaluation.length import held_tokens, warn_of_length
from kvexp.evaluation.shares import score_batches
from kvexp.measure.answered import Answered
from kvexp.measure.decay import prefix_decay
from kvexp.measure.state_error import errors_by_layer
from kvexp.measure.timing import Stopwatch
from kvexp.measure.usage import added, cache_usage
from kvexp.prompt import Context
from kvexp.report.folder import RunFolder
from kvexp.schema import Settings
from kvexp.tasks.adapter import KVLM
from kvexp.tasks.base import TaskSet
from kvexp.tasks.evaluate import LabelEvaluation, batched, by_length
from kvexp.tasks.questions import QuestionSet
from kvexp.tasks.scores import fidelity_summary, label_metrics
from kvexp.tasks.session import Session

log = logging.getLogger(__name__)
DECAY_TOKENS, DECAY_QUERIES = 32, 32


def context_of(settings: Settings, task: TaskSet | QuestionSet) -> Context:
    """Return the context that is encoded: the task's, or its header alone in the empty-prefix control."""
    assert task.context is not None
    return Context(task.context.header, ()) if settings.calibration.empty_prefix else task.context


def answer(
    settings: Settings,
    loaded: Any,
    task: TaskSet,
    memory: Any,
    folder: RunFolder,
    watch: Stopwatch,
    crew: Crew = ALONE,
) -> Answered:
    """Encode, query and measure a task with labels."""
    context = context_of(settings, task)
    queries = max(len(document.query_ids) for document in task.documents)
    session = Session(loaded, settings.method, memory, settings.budget, watch)
    warn_of_length(loaded, held_tokens(session, context) + queries + task.max_new_tokens)
    _tell_empty(settings, context)
    with settings.method.attach(loaded.model, memory):
        cache = session.context(context)
        samples, decay, others = _answered(settings, session, task, context, folder, crew)
    nominal = settings.budget.rows or max(cache.entries(), default=0)
    usage = cache_usage(loaded.model, cache, len(context), nominal)
    usage = added(usage, others) | facts_of(memory)
    fidelity = fidelity_summary(samples, decay) if settings.fidelity else None
    if fidelity is not None and settings.method.family == "memory" and _fits(memory):
        asked = [[*d.query_ids, *d.expected_ids] for d in task.documents[:DECAY_QUERIES]]
        fidelity["by_layer"] = errors_by_layer(
            settings.method, loaded.model, context, memory, asked, settings.batch_size
        )
    return Answered(label_metrics(samples), usage, fidelity, session.decoded, task.data_sha256)


def _fits(memory: Any) -> bool:
    # Whether full attention reads the context too: one that is too long for it is remembered in parts.
    return memory.manifest.get("parts", 1) == 1


def facts_of(memory: Any) -> dict[str, Any]:
    """Return what the record tells of a memory: what its entries cost, and in how many parts it was built."""
    manifest = {} if memory is None else getattr(memory, "manifest", {})
    return {name: value for name, value in manifest.items() if name.startswith("cost_") or name == "parts"}


def _tell_empty(settings: Settings, context: Context) -> None:
    """Warn when a method that chooses text by the budget is left without a demonstration."""
    if not context.chunks or not settings.method.uses_budget:
        return
    if len(settings.method.select(context, settings.budget)) <= len(context.header):
        log.warning("budget=%s holds no demonstration: the header alone is left, raise it", settings.budget)


def _answered(
    settings: Settings, session: Session, task: TaskSet, context: Context, folder: RunFolder, crew: Crew
) -> tuple[list[dict[str, Any]], dict[str, Any] | None, list[dict[str, int]]]:
    """Score every document that is not on disk yet, a batch at a time.

    Returns all samples, the decay, and what other processes counted; only rank 0 returns.
    """
    size, documents = settings.batch_size, task.documents
    adapter = KVLM(session, size)
    reference = known_answers(settings, session.loaded)
    evaluation = LabelEvaluation(adapter, task, context, settings.seed, reference)
    evaluation.measure_bias(size)  # also when all samples are there: the record tells what this process did
    batches = batched(by_length(documents), size)
    score_batches(
        folder,
        crew,
        batches,
        [[document.id for document in batch] for batch in batches],
        [context.key] * len(batches),
        [document.id for document in documents],
        evaluation.score,
        f"{settings.choices['task']} {settings.choices['method']}",
    )
    others = crew.gather(session.counters)[1:]
    crew.done()
    decay = None
    if reference is not None and settings.method.family == "memory":
        asked = [evaluation.instances(batch) for batch in batched(documents[:DECAY_QUERIES], size)]
        full = KVLM(reference.session, size)
        decay = prefix_decay(((full.batch(i), adapter.batch(i)) for i in asked), DECAY_TOKENS)
    return folder.samples(), decay, others
