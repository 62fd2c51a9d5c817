"""Attention of one decoding step by a memory, beside full attention over the prefix that it stands for.

    python -m kvexp.bench attention samples=FOLDER [layouts=pooled,group,shared] [lengths=4096,8192,16384]
        [layers=4,10,20] [rounds=15] [local=128] [recall=0.995] [kv_heads=3] [output_dir=outputs]

FOLDER holds collected states (`calibration.keep_samples=true` leaves one in STORE_DIR/samples-*). Of its
tokens 85% are clustered; of the rest, all of other traces, one half chooses how many of the K / 32 cells are
searched (`recall` in every codebook), the other half measures recall. Up to 4,096 entries are k-means
centroids of the samples; beyond, centroids of 4,096 plus the offset of a random sample from its own, marked
`resampled`. Outputs, log Z and the prefix's rows are random: they change no time.

One thread, batch 1, each layer with buffers of its own, turn about in one process. Timed per layer (CPU time;
median, and a quarter of the rounds below and above): torch's attention over K rows (`sdpa`; `folded` takes
the query heads of a KV head as a block), and for `flat`, `two_level` and `ivf` the whole step of a memory:
attention to `local` rows, lookup, reading the entry, merge; `torch` marks those for which there is no C++
compiler. JSON goes to
OUTPUT_DIR/bench/attention/found.json, centroids are kept beside it.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvexp.attention.local import attend
from kvexp.bench.attention_words import CELL, words_of
from kvexp.methods.memory.asm import ASM
from kvexp.methods.memory.grouping import Grouping
from kvexp.methods.memory.lookup import LayerLookup
from kvexp.methods.memory.states import LayerMemory
from kvexp.stats import kmeans
from kvexp.stats.samples import SampleStore
from kvexp_kernels.lookup import JointLists, TwoLevelIndex
from kvexp_kernels.merge_states import merge_states

REAL, TRAINED, STEPS = 4096, 0.85, 4  # steps: of each way in a round
GOALS = {("ivf", 4096): 3, ("ivf", 8192): 8, ("ivf", 16384): 15, ("flat", 4096): 1.5}
Step = Callable[[int], Any]


def main(arguments: Sequence[str]) -> int:
    """Cluster, choose, time, print, write."""
    words = words_of(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for layout in words.layouts:
        for length in words.lengths:
            books = [
                Books(words.store, words.kv_heads, layer, layout, length, words.folder)
                for layer in words.layers
            ]
            probe, recall, share = chosen(books, words.recall)
            row = {"layout": layout, "length": length, "resampled": length > REAL, "probe": probe}
            row |= {"recall": recall, "scored": share, "load": os.getloadavg()[0]}
            row["torch"] = not books[0].lookup("flat", probe).steps
            row["us"] = timed(steps(books, probe, words.local), len(words.layers), words.rounds)
            rows.append(row)
            show(row)
    slopes = exponents(rows)
    for layout, by_way in slopes.items():
        print(f"{layout}: cost grows as K to the power", {way: round(e, 2) for way, e in by_way.items()})
    (words.folder / "found.json").write_text(
        json.dumps({"rows": rows, "exponents": slopes}, indent=2) + "\n", encoding="utf-8"
    )
    return 0


class Books:
    """A layer's codebooks of `length` unit keys [C, K, d], and held-out queries [n, Hq, D] in two halves."""

    def __init__(
        self, store: SampleStore, kv: int, layer: int, layout: str, length: int, folder: Path
    ) -> None:
        q = torch.cat([block["q"] for block in store.blocks(layer, 4096, ["q"])]).float()
        self.grouping = Grouping.of(layout, q.shape[1], kv)
        cut = int(TRAINED * len(q))
        self.calibration, self.test = q[cut:].chunk(2)
        split = self.grouping.split(q[:cut]).flatten(-2)
        real = min(length, REAL)
        kept = folder / f"centroids-{layout}-{real}-{layer}.pt"
        if not kept.exists():
            torch.save([centroids(x, real, layer * 1000 + book) for book, x in enumerate(split)], kept)
        keys = [resampled(c, x, length) for c, x in zip(torch.load(kept), split, strict=True)]
        self.keys = torch.stack([F.normalize(c, dim=-1) for c in keys])
        self.cells = len(self.keys[0]) // CELL
        self.index = [TwoLevelIndex.build(c, self.cells) for c in self.keys]

    def samples(self, q: Tensor) -> Tensor:
        """Queries [n, Hq, D] -> [C, n', d]."""
        return self.grouping.split(q).flatten(-2)

    def lookup(self, way: str, probe: int) -> LayerLookup:
        """A memory of these keys with random states, searched in one way."""
        books, k, width = self.keys.shape
        heads = self.grouping.heads
        a = torch.randn(books, k, heads, width // heads)
        tensors = {"keys": self.keys.clone(), "a": a, "log_z": torch.randn(books, k, heads)}
        index: Sequence[TwoLevelIndex] | JointLists | None = None
        if way != "flat":  # clustered once for all ways
            index = [replace(index, keys=index.keys.clone()) for index in self.index]
            index = JointLists(index, tensors["keys"]) if way == "ivf" else index
        return LayerLookup(LayerMemory(self.grouping, tensors), None, 0, ASM(probe=probe), {}, index)


def centroids(x: Tensor, k: int, seed: int) -> Tensor:
    """Centroids [k, d] of samples [n, d], clustered as a memory is."""
    return kmeans.lloyd(lambda: iter(x.split(8192)), k, 3, seed, init="kmeans++").centroids


def resampled(c: Tensor, x: Tensor, length: int) -> Tensor:
    """`length` keys: the centroids themselves, or centroids with the offset of a sample from its own."""
    if length <= len(c):
        return c
    some = x[torch.randint(len(x), (length,))]
    offset = some - c[kmeans.assign(some, c)]
    return c[torch.arange(length) % len(c)] + offset


def chosen(books: Sequence[Books], target: float) -> tuple[int, float, float]:
    """The fewest cells that reach the target in every codebook on one half; recall and share on the other."""
    probe = max(
        index.probe_for(x, target)
        for one in books
        for index, x in zip(one.index, one.samples(one.calibration), strict=True)
    )
    hits = total = scored = held = 0
    for one in books:
        for index, keys, x in zip(one.index, one.keys, one.samples(one.test), strict=True):
            found, cost = index.search(x, probe)
            score = x @ keys.T
            best, ours = score.amax(1), score.gather(1, found[:, None])[:, 0]
            hits += int((best - ours <= 1e-6 * x.norm(dim=1)).sum())
            total, scored, held = total + len(x), scored + cost, held + len(x) * len(keys)
    return probe, hits / total, scored / held


def steps(books: Sequence[Books], probe: int, local: int) -> dict[str, Step]:
    """One step of a layer, by name; each layer has buffers of its own, and the next query at every call."""
    heads, width = books[0].test.shape[1:]
    kv, length = books[0].grouping.kv_heads, books[0].keys.shape[1]
    near, far = (
        [[torch.randn(1, kv, rows, width) for _ in range(2)] for _ in books] for rows in (local, length)
    )
    ways = {way: [one.lookup(way, probe) for one in books] for way in ("flat", "two_level", "ivf")}
    turn, scale = iter(range(1 << 62)), width**-0.5

    def query(layer: int) -> Tensor:
        return books[layer].test[next(turn) % len(books[layer].test)][None]

    def memory(way: str) -> Step:
        def step(layer: int) -> Tensor:
            q = query(layer)
            key, value = near[layer]
            if (whole := ways[way][layer].step(q, q, key, value, scale)) is not None:
                return whole[0][:, :, None]
            a, s = attend(q[:, :, None], key, value, scale)
            found_a, found_s = ways[way][layer].find(q)
            return merge_states(found_a[:, :, None], found_s[:, :, None], a, s)[0]

        return step

    def full(shape: tuple[int, ...]) -> Step:
        def step(layer: int) -> Tensor:
            key, value, grouped = *far[layer], shape[1] != kv
            return F.scaled_dot_product_attention(query(layer).view(shape), key, value, enable_gqa=grouped)

        return step

    plain = {"sdpa": full((1, heads, 1, width)), "folded": full((1, kv, heads // kv, width))}
    return plain | {way: memory(way) for way in ways}


@torch.no_grad()
def timed(ways: dict[str, Step], layers: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of CPU time per layer: the quartiles over rounds, of which the first is left out."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, step in ways.items():
            start = time.process_time_ns()
            for _ in range(STEPS):
                for layer in range(layers):
                    step(layer)
            if number:
                spent[name].append((time.process_time_ns() - start) / 1e3 / layers / STEPS)
    return {name: statistics.quantiles(times, n=4) for name, times in spent.items()}


def exponents(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Slope of log cost over log K for each layout and way, by least squares; nothing for a single length."""
    found: dict[str, dict[str, float]] = {}
    for layout in dict.fromkeys(row["layout"] for row in rows):
        own = [row for row in rows if row["layout"] == layout]
        if len(own) > 1:
            x = [math.log(row["length"]) for row in own]
            found[layout] = {
                way: statistics.linear_regression(x, [math.log(row["us"][way][1]) for row in own]).slope
                for way in own[0]["us"]
            }
    return found


def show(row: dict[str, Any]) -> None:
    """Print one size."""
    kind = "resampled" if row["resampled"] else "real"
    cells = row["length"] // CELL
    print(
        f"{row['layout']}, K = {row['length']} {kind}, {row['probe']} of {cells} cells, recall"
        f" {row['recall']:.4f}, {row['scored']:.1%} scored, load {row['load']:.1f}"
        + (", memories by torch" if row["torch"] else ""),
        flush=True,
    )
    for way, (low, middle, high) in row["us"].items():
        goal = GOALS.get((way, row["length"])) if row["layout"] == "pooled" else None
        text = f" (goal {goal})" if goal else ""
        print(
            f"  {way:10s} {middle:8.0f} us ({low:.0f} to {high:.0f}), sdpa takes"
            f" {row['us']['sdpa'][1] / middle:5.2f} times as long{text}",
            flush=True,
        )
