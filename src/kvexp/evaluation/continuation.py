"""Continuation: feed texts on, block by block, and compare each next token with full attention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import torch

from kvexp.crew.crew import ALONE, Crew
from kvexp.evaluation.reference import reference
from kvexp.evaluation.shares import score_batches
from kvexp.measure.answered import Answered
from kvexp.measure.timing import Stopwatch
from kvexp.measure.usage import added, cache_usage, total_usage
from kvexp.methods.eviction.base import EvictionMethod
from kvexp.methods.storage.base import StorageMethod
from kvexp.progress import track
from kvexp.prompt import Context
from kvexp.report.folder import RunFolder
from kvexp.schema import Settings
from kvexp.tasks.continuation import Stretch, TextSet
from kvexp.tasks.evaluate import batched
from kvexp.tasks.fidelity import token_scores
from kvexp.tasks.scores import continuation_metrics
from kvexp.tasks.session import Session

SCORES = ("nll", "nll_full", "kl", "top1_agreement")


def answer(
    settings: Settings,
    loaded: Any,
    task: TextSet,
    memory: Any,
    folder: RunFolder,
    watch: Stopwatch,
    crew: Crew = ALONE,
) -> Answered:
    """Score every text that is not on disk yet, a batch at a time."""
    session = Session(loaded, settings.method, memory, settings.budget, watch)
    batches = batched(task.texts, settings.batch_size)
    order = [text.id for text in task.texts]
    usages: list[dict[str, Any]] = []

    def fed(batch: Sequence[Stretch]) -> list[dict[str, Any]]:
        samples, usage = _fed(settings, session, task, batch)
        usages.append(usage)
        return samples

    ids = [[text.id for text in batch] for batch in batches]
    with settings.method.attach(loaded.model, memory):
        what = f"{settings.choices['task']} {settings.choices['method']}"
        score_batches(folder, crew, batches, ids, range(len(ids)), order, fed, what)
        others = crew.gather([usages, session.counters])[1:]
        crew.done()
        if not usages:  # everything was on disk: one batch tells what the method holds
            fed(batches[0])
    metrics = continuation_metrics(folder.samples())
    fidelity = {name: metrics[name]["value"] for name in ("kl", "top1_agreement")}
    theirs = [usage for some, _ in others for usage in some]
    usage = added(total_usage([*theirs, *usages]), [counters for _, counters in others])
    return Answered(metrics, usage, fidelity, 0, task.data_sha256)


@torch.no_grad()
def _fed(
    settings: Settings, session: Session, task: TextSet, batch: Sequence[Stretch]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Feed one batch of texts; return its samples and the `cache` section."""
    model = session.model
    known = reference(
        session.loaded, [text.ids for text in batch], task.prefill, settings.store_dir, settings.batch_size
    )
    cache = session.context([Context((), (text.ids[: task.prefill],)) for text in batch])
    running = cache.fork()
    ids = torch.tensor([text.ids for text in batch], device=model.device)
    width = ids.shape[1] - 1  # the last token is only predicted
    rows: list[dict[str, torch.Tensor]] = []
    what = f"{settings.choices['task']} {settings.choices['method']}"
    for at, end in track(list(blocks(settings, task, width)), what, unit="blocks"):
        positions = torch.arange(at, end, device=ids.device)[None]
        with session.watch("block"):
            output = model(ids[:, at:end], cache=running, position_ids=positions)
        span = slice(at - task.prefill, end - task.prefill)
        following = ids[:, at + 1 : end + 1]
        full = known.logits(model, span)
        scores = token_scores(full.flatten(0, 1), output.logits.flatten(0, 1), following.flatten())
        rows.append({name: values.view(following.shape) for name, values in scores.items()})
    tokens = {name: torch.cat([row[name] for row in rows], dim=1) for name in SCORES}
    usage = cache_usage(model, running, width, settings.budget.rows or width)
    return [_line(settings, task, text, tokens, i) for i, text in enumerate(batch)], usage


def blocks(settings: Settings, task: TextSet, width: int) -> Iterator[tuple[int, int]]:
    """Yield where each block begins and ends, such that rows leave, or are packed, as token by token."""
    size: int = task.block
    turns: Iterator[int] = iter(())
    storage = settings.method if isinstance(settings.method, StorageMethod) else None
    method = settings.method if storage is None else storage.of
    if isinstance(method, EvictionMethod):  # what is packed is what stays when others leave
        if settings.budget.rows is not None:
            deciding = method.during("decode")
            if deciding.stepwise or deciding.smooth:
                size = 1
            turns = _turns(method, settings.budget.rows, task.prefill)
    elif storage is not None and storage.decode:
        context = Context((), (tuple(range(task.prefill)),))
        turns = _packings(storage, task.prefill, len(method.select(context, settings.budget)))
    at = turn = task.prefill
    while at < width:
        if turn <= at:
            turn = next(turns, width)
        end = min(at + size, turn, width)
        yield at, end
        at = end


def _turns(method: EvictionMethod, rows: int, read: int) -> Iterator[int]:
    """Yield how many tokens have been fed whenever rows may leave, behind the `read` ones of the prompt."""
    reading, deciding = method.during("prefill"), method.during("decode")
    compressed = reading.prefill != "off" and read > rows
    if reading.query_aware and reading.prefill != "off" and read >= rows:
        read, compressed = read + 1, True  # the first token fed is the query
        yield read
    interval = deciding.interval
    if interval is None:
        return
    if deciding.trigger == "length":
        first = (read // interval + 1) * interval
    else:
        first = read + interval if compressed else max(read + 1, rows + interval)
    yield from count(first, interval)


def _packings(method: StorageMethod, read: int, held: int) -> Iterator[int]:
    """Yield how many tokens have been fed whenever rows are packed, behind the `read` ones of the prompt.

    `held`: the rows of the prompt. Layers pack at the same times.
    """
    scheme = method.scheme(0)
    for rows in count(held + 1):
        if scheme.packed(rows) != scheme.packed(rows - 1):
            yield read + rows - held


def _line(
    settings: Settings, task: TextSet, text: Stretch, tokens: dict[str, torch.Tensor], row: int
) -> dict[str, Any]:
    """Return a text's sample: means over its tokens, and over each block of `task.block` of them."""
    spans = {
        name: [float(part.mean()) for part in values[row].split(task.block)]
        for name, values in tokens.items()
    }
    scored = tokens["nll"].shape[1]
    return {
        "id": text.id,
        "sample": text.sample,
        "seed": settings.seed,
        "query": "",
        "answer": "",
        "expected": "",
        "scores": {name: float(values[row].mean()) for name, values in tokens.items()},
        "prompt_tokens": task.prefill,
        "new_tokens": scored,
        "stop": "length",
        "blocks": spans,
        "perplexity": math.exp(float(tokens["nll"][row].mean())),
    }
