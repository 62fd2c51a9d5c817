"""The `prepare` stage of a run: draw the traces, then load the memory by its fingerprint or build it."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvexp.attention.devices import layer_devices
from kvexp.budget import Budget
from kvexp.calibration.store import Store
from kvexp.crew.crew import ALONE, Crew
from kvexp.errors import UserError
from kvexp.methods.baseline.full import Full
from kvexp.prompt import Context, bos_ids, encode
from kvexp.tasks.adapter import KVLM
from kvexp.tasks.base import TaskSet, Trace, TraceSource
from kvexp.tasks.evaluate import LabelEvaluation
from kvexp.tasks.session import Session
from kvexp.tasks.texts import load_texts

log = logging.getLogger(__name__)


def draw_traces(
    spec: Any, source: TraceSource, loaded: Any, context: Context, seed: int
) -> list[tuple[int, ...]]:
    """Return the token ids of `spec.n` traces, labelled as `spec.labels` says.

    `model` lets the model itself answer each query under the full context, so that no gold label is used.
    """
    by_model = spec.labels == "model" and isinstance(source, TaskSet)  # a task without labels refuses it
    labels = "none" if by_model else spec.labels
    traces = source.traces(spec.n, labels, seed)
    if by_model:
        assert isinstance(source, TaskSet)
        traces = _answered(spec, traces, source, loaded, context, seed)
    return [(*trace.query_ids, *trace.answer_ids) for trace in traces]


def draw_segments(spec: Any, loaded: Any, data_dir: str | None) -> list[tuple[int, ...]]:
    """Return segments of a corpus as token ids: `spec.tokens` tokens in all, `spec.segment` each.

    Every segment opens with the model's BOS. Raises UserError when the corpus is shorter.
    """
    bos = bos_ids(loaded.tokenizer)
    length, left = max(1, spec.segment - len(bos)), spec.tokens
    segments: list[tuple[int, ...]] = []
    for text in load_texts(spec.path or spec.source, data_dir):
        ids = encode(loaded.tokenizer, text.text)
        for at in range(0, len(ids), length):
            part = ids[at : min(at + length, at + left)]
            segments.append((*bos, *part))
            left -= len(part)
            if left <= 0:
                return segments
    raise UserError(
        f"the corpus {spec.path or spec.source} has {spec.tokens - left} tokens: set"
        f" calibration.tokens={spec.tokens - left} or less"
    )


def _answered(spec, traces: list[Trace], source: TaskSet, loaded, context: Context, seed: int) -> list[Trace]:
    adapter = KVLM(Session(loaded, Full(), None, Budget(None)))
    scorer = LabelEvaluation(adapter, source, context, seed)
    answered = []
    with Full().attach(loaded.model):
        for at in range(0, len(traces), spec.batch_size):
            part = traces[at : at + spec.batch_size]
            scores = adapter.label_scores([scorer.instance(t.query_ids) for t in part], scorer.trie)
            chosen = scores.argmax(-1).tolist()
            answered += [
                replace(t, answer_ids=source.answer_ids[i]) for t, i in zip(part, chosen, strict=True)
            ]
    return answered


def prepare(
    method: Any,
    loaded: Any,
    context: Context,
    traces: list[tuple[int, ...]],
    budget: Budget,
    seed: int,
    store_dir: Path,
    batch_size: int,
    make_trainer: Callable[..., Any],
    keep_samples: bool = False,
    crew: Crew = ALONE,
) -> tuple[Any, Path, bool]:
    """Return (memory, its folder, whether it was built now) of a method that needs calibration.

    `traces` are the token ids of traces, or of the segments of a text, which stand on an empty `context`.
    Every rank of a crew builds its share, and has the whole in the end.
    """
    if not traces:
        raise UserError("calibration has nothing to learn from, use calibration.n=300")
    memory_class = method.memory_class()
    source = {
        "model": loaded.sha256,
        "dtype": str(loaded.dtype),
        "context": context.key,
        "traces": hashlib.sha256(repr(traces).encode()).hexdigest()[:16],
        "format": memory_class.FORMAT,
    }
    name = method.memory_id or method.id  # methods that learn the same share it
    facts = {"method": name, **source, **method.memory_facts(budget, seed)}
    store = Store(store_dir, crew)

    def build(work: Path) -> Any:
        from kvexp.calibration.module import Runner  # Lightning is slow to import

        with store.samples({**source, **method.sample_knobs()}, keep_samples) as samples:
            runner = Runner(context, traces, samples, make_trainer, batch_size, seed, work, crew)
            begun, used = time.perf_counter(), time.process_time()
            memory = method.prepare(loaded.model, runner, budget)
            taken = time.perf_counter() - begun, time.process_time() - used
            log.info("calibrated in %.2f s, %.2f s of CPU on each of %d", *taken, crew.world)
            return memory

    memory, folder, built = store.get(name, facts, memory_class.load, build)
    return memory.to(layer_devices(loaded.model)), folder, built
