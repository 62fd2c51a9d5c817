"""How well an attention-state memory stands for its prefix, by number of entries, and what two-level
lookup costs.

    python scripts/asm_fidelity.py task=banking77 task.n_labels=12 data_dir=PATH calibration.n=700 \
        calibration.labels=gold [method.layout=shared ...] [limit=100] [sizes=64,256]

The words are those of `python -m kvexp`. One collection serves all sizes. For K = 64, 256, 1,024 and 4,096 it
prints the relative error of the merged attention output and of log Z on held-out queries with their gold
answers, mean over layers and worst layer; for the largest K also the agreement of two-level lookup (128
cells, 16 searched) with flat lookup (an entry whose cosine is equal counts; `same` counts the same entry
only) and the share of keys it scores. JSON goes to outputs/asm_fidelity.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning

from kvexp import model
from kvexp.calibration.module import Runner
from kvexp.calibration.prepare import draw_traces
from kvexp.cli import settings_of
from kvexp.measure.state_error import StateErrorMeter
from kvexp.methods.memory.build import LayerBuilder, stored
from kvexp.methods.memory.collect import encode_chunks, forward
from kvexp.methods.memory.grouping import Grouping
from kvexp.methods.memory.lookup import LayerLookup
from kvexp.methods.memory.prepare import collected, dims

SIZES = (64, 256, 1024, 4096)
CELLS, PROBE = 128, 16
BATCH = 25


def main(words: list[str]) -> int:
    """Collect once, build each size, compare on held-out queries."""
    own = [word for word in words if word.startswith("sizes=")]
    words = [word for word in words if word not in own]
    sizes = [int(size) for word in own for size in word.removeprefix("sizes=").split(",")] or list(SIZES)
    [run] = settings_of(["method=asm", "limit=100", "budget=4096", *words])
    loaded = model.load(run.model)
    task = run.task.load(loaded.tokenizer, seed=run.seed, limit=run.limit, data_dir=run.data_dir)
    traces = draw_traces(run.calibration, task, loaded, task.context, run.seed)
    method: Any = run.method
    q_heads, kv_heads, *_ = dims(loaded.model)
    grouping = Grouping.of(method.layout, q_heads, kv_heads, method.heads_per_entry)
    [cache] = encode_chunks(method, loaded.model, task.context)
    queries = [[*d.query_ids, *d.expected_ids] for d in task.documents]
    print(
        f"{len(task.context)} prefix tokens, {len(traces)} traces, {len(queries)} held-out queries",
        flush=True,
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = partial(lightning.Trainer, accelerator="cpu", devices=1)
        runner = Runner(task.context, traces, Path(folder), trainer, run.calibration.batch_size, run.seed)
        store = collected(method, loaded.model, [cache], runner)
        for size in sizes:
            built = {
                i: LayerBuilder(method, store, i, grouping, size, run.seed).build() for i in store.layers
            }
            memory = {i: stored(m, loaded.model.dtype, method.entries == "int8") for i, m in built.items()}
            rows.append(compare(method, loaded.model, cache, memory, queries, size, size == max(sizes)))
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "by_layer"}), flush=True)
    Path("outputs").mkdir(exist_ok=True)
    Path("outputs/asm_fidelity.json").write_text(json.dumps({"words": words, "rows": rows}, indent=2) + "\n")
    return 0


def compare(
    method: Any, net: Any, cache: Any, memory: dict, queries: list, size: int, two: bool
) -> dict[str, Any]:
    """Run the held-out queries once over exact states; look each up flat, and two-level at the largest
    size."""
    knobs = (
        {"lookup": "two_level", "cells": CELLS, "probe": PROBE, "recall": True} if two else {"lookup": "flat"}
    )
    counters: dict[int, dict[str, int]] = {i: {} for i in memory}
    method = replace(method, **knobs)
    lookups = {i: LayerLookup(m, net, i, method, counters[i]) for i, m in memory.items()}
    meter = StateErrorMeter(lookups)
    with method.attach(net):
        for at in range(0, len(queries), BATCH):
            fork = cache.fork()
            fork.observe(meter)
            forward(net, fork, queries[at : at + BATCH])
    relative, log_z = meter.relative_errors(), meter.log_z_errors()
    row = {
        "entries": size,
        "relative_error": sum(relative) / len(relative),
        "relative_error_worst_layer": max(relative),
        "log_z_error": sum(log_z) / len(log_z),
        "by_layer": relative,
    }
    if two:
        agreement = [c["agreed_with_flat"] / c["compared_with_flat"] for c in counters.values()]
        row["two_level_agreement"] = sum(agreement) / len(agreement)
        row["two_level_agreement_worst_layer"] = min(agreement)
        row["two_level_same"] = sum(
            c["same_as_flat"] / c["compared_with_flat"] for c in counters.values()
        ) / len(counters)
        row["two_level_keys_scored"] = sum(c["keys_scored"] for c in counters.values()) / sum(
            c["keys_held"] for c in counters.values()
        )
    return row


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
