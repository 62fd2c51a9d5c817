"""What calibration costs beside the forward passes that it cannot do without; and what a second rank saves.

    python scripts/bench_calibration.py cost calibration.n=1000 [words of a command line ...]
    python scripts/bench_calibration.py scale calibration.n=2000 [words ...]

`cost`: each batch of traces runs twice in turn, bare (attention to the encoded prefix, nothing collected) and
collected; then the layers are clustered. Printed: seconds, and (collecting + clustering) / bare.
`scale`: the calibration on one rank and on two in turn, `rounds=3` times, one thread a rank, each as long as
its log says: from the encoding of the prefix to the finished memory, after start-up. Printed: medians. On a
busy machine only `cpu_ratio` means anything: the CPU time of rank 0 alone over that of rank 0 of two.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from kvexp import model
from kvexp.calibration.module import planned
from kvexp.calibration.prepare import draw_traces
from kvexp.cli import settings_of
from kvexp.methods.memory.build import LayerBuilder
from kvexp.methods.memory.collect import Collector, encode_chunks, forward
from kvexp.methods.memory.grouping import Grouping
from kvexp.methods.memory.prepare import dims, fields, stored
from kvexp.progress import track
from kvexp.stats.samples import SampleStore

TWO = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2")
WORDS = ("method=asm", "budget=1024", "task.context_tokens=4096", "logger=none", "limit=10")


def joined(words: list[str]) -> list[str]:
    """Return the words with those of WORDS before them that they do not set anew."""
    keys = {word.partition("=")[0] for word in words}
    return [*(word for word in WORDS if word.partition("=")[0] not in keys), *words]


class Cost:
    """One cell's traces, run in turn bare and collected."""

    def __init__(self, words: list[str], folder: Path) -> None:
        [run] = settings_of(joined([*words, f"output_dir={folder}"]))
        self.run, self.method, loaded = run, run.method, model.load(run.model)
        self.model: Any = loaded.model
        task = run.task.load(loaded.tokenizer, seed=run.seed, limit=run.limit, data_dir=run.data_dir)
        traces = draw_traces(run.calibration, task, loaded, task.context, run.seed)
        self.batches = planned(traces, run.calibration.batch_size)
        self.tokens = sum(map(len, traces))
        begun = time.perf_counter()
        self.caches = encode_chunks(self.method, self.model, task.context)
        self.encode_s = time.perf_counter() - begun
        layers, shapes, dtype = fields(self.method, self.model, self.caches[-1])
        self.store = SampleStore.create(folder / "samples", layers, shapes, dtype)

    @torch.no_grad()
    def collect(self) -> tuple[float, float]:
        """Return the seconds of all batches bare, and collected."""
        collector = Collector(self.method, self.model, self.caches, self.store)
        bare = collected = 0.0
        for batch in track(self.batches, "bare and collected", unit="batches"):
            begun = time.perf_counter()
            with self.method.attach(self.model):
                forward(self.model, self.caches[0].fork(), batch)
            between = time.perf_counter()
            collector(batch)
            bare += between - begun
            collected += time.perf_counter() - between
        collector.close()
        return bare, collected

    def cluster(self) -> float:
        """Return the seconds of clustering all layers."""
        q_heads, kv_heads, *_ = dims(self.model)
        method = self.method
        grouping = Grouping.of(method.layout, q_heads, kv_heads, method.heads_per_entry)
        k = min(self.run.budget.rows or 1024, self.tokens * grouping.samples)
        begun = time.perf_counter()
        for layer in track(self.store.layers, "clustering", unit="layers"):
            builder = LayerBuilder(method, self.store, layer, grouping, k, 0, self.model.device)
            stored(builder.build(), self.model.dtype, method.entries == "int8")
        return time.perf_counter() - begun


def cost(words: list[str]) -> None:
    """Print what collecting and clustering add to bare forwards."""
    with tempfile.TemporaryDirectory() as folder:
        work = Cost(words, Path(folder))
        bare, collected = work.collect()
        clustered = work.cluster()
        row = {
            "trace_tokens": work.tokens,
            "encode_s": work.encode_s,
            "bare_s": bare,
            "collect_s": collected,
            "cluster_s": clustered,
            "collect_ratio": collected / bare,
            "ratio": (collected + clustered) / bare,
            "samples_bytes": work.store.nbytes(),
        }
    print(json.dumps({name: round(x, 3) for name, x in row.items()}))


def timed(words: list[str], *more: str) -> tuple[float, float]:
    """Return the seconds of a run's calibration after its start-up: of time, and of CPU on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kvexp", *joined([*words, *more, f"output_dir={folder}"])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, capture_output=True)
        [log] = Path(folder).rglob("log.txt")
        found = re.search(r"calibrated in ([0-9.]+) s, ([0-9.]+) s of CPU", log.read_text())
        return float(found[1]), float(found[2])


def scale(words: list[str]) -> None:
    """Print the medians on one rank and on two, and their ratio."""
    rounds = next((int(word[7:]) for word in words if word.startswith("rounds=")), 3)
    words = [word for word in words if not word.startswith("rounds=")]
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        (one, one_cpu), (two, two_cpu) = (timed(words, *more) for more in ((), TWO))
        row = {"one_s": one, "two_s": two, "ratio": one / two, "cpu_ratio": one_cpu / two_cpu}
        for name, value in row.items():
            found.setdefault(name, []).append(value)
        print(json.dumps({name: round(x, 2) for name, x in row.items()}), flush=True)
    print("median", json.dumps({name: round(statistics.median(x), 2) for name, x in found.items()}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"cost": cost, "scale": scale}[sys.argv[1]](sys.argv[2:])
