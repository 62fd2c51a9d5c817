"""Prefill with reused units beside full recompute: how many times faster, and what was really recomputed.

    python -m kvexp.bench prefill [lengths=2048,4096] [batches=1,4] [shares=0.1,0.3] [repeats=3]
        [methods=agentkvshift,...] [threads=1] [data_dir=PATH] [output_dir=outputs] [key=value ...]

A context has so many tokens, in units of about 128: with data_dir the notes of LoCoMo that a memory finds
for a question (task.notes, rag by default), else passages of the calibration text. Units are encoded behind
the header beforehand, stored exactly, and every method takes them from the same store. What is timed is the
context's cache and the question's forward on it; methods take turns, after a short warm-up.

    agentkvshift         two sets of probes          cacheblend   agentkvshift_plus   prophetkv
    agentkvshift_shared  one set for both            reposition   (nothing recomputed: at no share)

Times are the process's own on a CPU with one thread, so that other processes disturb them little, and wall
time elsewhere. The base is `full` or `full_recompute`, whichever had the lower median. Printed: medians over
repeats of seconds and of base / method within a repeat, with the least and the most; `union`, the share of
unit tokens that were chosen, and `computed`, that of unit tokens times layers that were run, the check
layer's included; and how the goals for one context on one thread were met.

Other words are those of `python -m kvexp`. Each length and batch is a cell of its own, written as JSON to
OUTPUT_DIR/bench/prefill/MODEL/LENGTHxBATCH.json.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import kvexp
from kvexp.attention.options import Options, set_options
from kvexp.bench.decoder import numbers_of
from kvexp.bench.prompts import Prompts, cut, prompts_for
from kvexp.bench.turns import folder_of
from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.measure.timing import Stopwatch
from kvexp.methods.baseline.full import Full
from kvexp.methods.reuse.reposition import Reposition
from kvexp.model import load_once
from kvexp.progress import track
from kvexp.tasks.batch import QueryBatch

WORDS = ("logger=none", "method=full", "task=locomo", "task.notes=rag")
BASES = ("full", "full_recompute")
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "agentkvshift": ("agentkvshift", {}),
    "agentkvshift_shared": ("agentkvshift", {"sets": "shared"}),
    "agentkvshift_plus": ("agentkvshift_plus", {}),
    "cacheblend": ("cacheblend", {}),
    "prophetkv": ("prophetkv", {}),
    "reposition": ("reposition", {}),
}
LISTS = {"lengths": "2048,4096", "batches": "1,4", "shares": "0.1,0.3", "methods": ",".join(METHODS)}
NUMBERS = {"repeats": 3, "threads": 1}
Key = tuple[str, str | None]  # a method, and its share where it has one
WARM, STORE_MB = 256, 10**6  # tokens of a warm-up; room for every unit of the largest batch


class Goal(NamedTuple):
    """`method` at share 0.1 is to be `bar` times as fast, where its union is at most `union`."""

    length: int
    method: str
    bar: float
    union: float = 1.0


GOALS = (
    Goal(2048, "agentkvshift", 3.5),
    Goal(4096, "agentkvshift", 3.0),
    Goal(4096, "agentkvshift", 4.0, union=0.15),
    Goal(2048, "agentkvshift_shared", 4.5),
    Goal(4096, "agentkvshift_shared", 4.5),
)


@dataclass(frozen=True)
class Row:
    """What one method took: seconds of each repeat, and its two shares of what full recompute computes."""

    method: str
    share: str | None
    seconds: tuple[float, ...]
    union: float = 1.0
    computed: float = 1.0

    def times(self, base: Row) -> tuple[float, float, float]:
        """Return how many times faster than `base`: median, least and most over repeats."""
        ratios = [theirs / ours for theirs, ours in zip(base.seconds, self.seconds, strict=True)]
        return statistics.median(ratios), min(ratios), max(ratios)


def base_of(rows: Sequence[Row]) -> Row:
    """Return the base with the lower median."""
    return min((row for row in rows if row.method in BASES), key=lambda row: statistics.median(row.seconds))


def built(methods: Sequence[str], shares: Sequence[str]) -> dict[Key, Any]:
    """Return the bases and the methods, by name and share."""
    found: dict[Key, Any] = {(name, None): kvexp.method(name) for name in BASES}
    for name in methods:
        method, knobs = METHODS[name]
        if method == "reposition":
            found[name, None] = kvexp.method(method)
            continue
        for share in shares:
            found[name, share] = kvexp.method(method, recompute=share, **knobs)
    return found


def ready(model: Any, method: Any, prompts: Prompts, store: Any) -> Any:
    """Encode contexts and run their questions; return the cache of the contexts."""
    more = {} if method.family != "reuse" else {"memory": store, "query": prompts.queries}
    cache = method.encode(model, prompts.contexts, **more)
    with Full().attach(model):
        QueryBatch(model, cache, prompts.queries)
    return cache


def measure(
    model: Any,
    methods: Mapping[Key, Any],
    prompts: Prompts,
    watch: Stopwatch,
    repeats: int,
) -> list[Row]:
    """Let each method make the contexts ready, in turn, `repeats` times."""
    store = Reposition(store_mb=STORE_MB).opened(model)
    short = Prompts([cut(one, WARM) for one in prompts.contexts[:1]], prompts.queries[:1], prompts.source)
    for method in methods.values():
        ready(model, method, short, store)
    Reposition().encode(model, prompts.contexts, store)
    seconds: dict[Key, list[float]] = {key: [] for key in methods}
    reports: dict[Key, Any] = {}
    turns = [(key, method) for _ in range(repeats) for key, method in methods.items()]
    for key, method in track(turns, f"{len(prompts.contexts[0])} x {len(prompts.contexts)}", unit="runs"):
        before = watch.seconds("ready") or 0.0
        with watch("ready"):
            cache = ready(model, method, prompts, store)
        seconds[key].append((watch.seconds("ready") or 0.0) - before)
        reports[key] = getattr(cache, "report", None)
        del cache  # its rows may be most of what is held
    rows = []
    for (name, share), taken in seconds.items():
        report = None if name in BASES else reports[name, share]
        shares = () if report is None else (report.union_share, report.share)
        rows.append(Row(name, share, tuple(taken), *shares))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return what was measured, as Markdown."""
    head = ["method", "share", "seconds", "times faster", "least to most", "union", "computed"]
    lines, base = [head, ["---"] * len(head)], base_of(rows)
    for row in rows:
        median, least, most = row.times(base)
        line = [row.method, row.share or "–", f"{statistics.median(row.seconds):.3f}", f"{median:.2f}"]
        lines.append([*line, f"{least:.2f} to {most:.2f}", f"{row.union:.3f}", f"{row.computed:.3f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def judged(rows: Sequence[Row], length: int) -> list[str]:
    """Return a line for each goal at this length."""
    at_share = {row.method: row for row in rows if row.share == "0.1"}
    lines, base = [], base_of(rows)
    for goal in GOALS:
        row = at_share.get(goal.method)
        if goal.length != length or row is None:
            continue
        median, *_ = row.times(base)
        wanted = f"{goal.method}, {length} tokens, share 0.1: at least {goal.bar} times as fast"
        verdict = f"{median:.2f}, {'met' if median >= goal.bar else 'missed'}"
        if goal.union < 1:
            wanted += f" where the union is at most {goal.union}"
            verdict = verdict if row.union <= goal.union else f"not asked, the union is {row.union:.3f}"
        lines.append(f"{wanted}: {verdict}")
    return lines


def clock_of(device: str, threads: int) -> tuple[str, Callable[[], float]]:
    """Return the name of the time that is taken, and its clock."""
    if device == "cpu" and threads == 1:
        return "CPU", time.process_time
    return "wall", time.perf_counter


def lists_of(words: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return (LISTS with what `words` give them, the other words); UserError for what cannot be."""
    given, others = dict(LISTS), []
    for word in words:
        key, _, value = word.partition("=")
        if key in given:
            given[key] = value
        else:
            others.append(word)
    found = {key: value.split(",") for key, value in given.items()}
    for key in ("lengths", "batches"):
        if not all(one.isdecimal() and int(one) for one in found[key]):
            raise UserError(f"{key}={given[key]} are no numbers above 0: write {key}={LISTS[key]}")
    if not set(found["methods"]) <= set(METHODS):
        raise UserError(f"methods={given['methods']} are not all measured: name some of {', '.join(METHODS)}")
    return found, others


def main(arguments: Sequence[str]) -> int:
    """Measure, print, write."""
    numbers, others = numbers_of(arguments, NUMBERS)
    lists, words = lists_of(others)
    [settings] = settings_of([*WORDS, *words])
    methods = built(lists["methods"], lists["shares"])
    folder = folder_of(settings.output_dir, f"prefill/{settings.model.label}")
    torch.set_num_threads(numbers["threads"])
    loaded, spec = load_once(settings.model), settings.model
    set_options(loaded.model, Options(spec.attention, spec.prefill_chunk, spec.compiled))
    name, clock = clock_of(str(loaded.device), numbers["threads"])
    for length, batch in [(int(n), int(b)) for n in lists["lengths"] for b in lists["batches"]]:
        prompts = prompts_for(settings, loaded, length, batch)
        watch = Stopwatch(str(loaded.device), clock)
        rows = measure(loaded.model, methods, prompts, watch, numbers["repeats"])
        facts: dict[str, Any] = {
            "words": list(arguments),
            "model": loaded.name,
            "dtype": str(loaded.dtype),
            "clock": name,
        }
        facts |= {"device": str(loaded.device), "threads": torch.get_num_threads(), "load": os.getloadavg()}
        facts |= {"length": length, "batch": batch, "repeats": numbers["repeats"], "source": prompts.source}
        goals = judged(rows, length) if batch == 1 and numbers["threads"] == 1 else []
        shown = ", ".join(f"{key} {facts[key]}" for key in ("dtype", "device", "threads", "clock"))
        load = " ".join(f"{one:.1f}" for one in os.getloadavg())
        print(f"\n{loaded.name}, {length} tokens, batch {batch}, {prompts.source}; {shown}, load {load}\n")
        print("\n".join([table(rows), "", *goals]), flush=True)
        found = facts | {"base": base_of(rows).method, "rows": [vars(row) for row in rows], "goals": goals}
        (folder / f"{length}x{batch}.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0
