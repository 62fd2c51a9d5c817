"""The score of each item, read from samples.jsonl.

Two runs answer the same item when id, query and expected answer agree: the same id alone may stand for
another question under another seed. Several answers to one question (`samples=8`) are one item.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kvexp.report.stored import read_samples

Record = Mapping[str, Any]
Item = tuple[str, str, str]
Answers = dict[Item, tuple[float, ...]]


@dataclass
class Items:
    """Reads the samples and scores of runs, each folder once."""

    _read: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def samples(self, record: Record) -> list[dict[str, Any]]:
        """Return the run's samples in order, none when they are gone."""
        folder = record.get("folder")
        if folder is None or record.get("samples") is False:  # they cannot be read
            return []
        if folder not in self._read:
            self._read[folder] = read_samples(Path(folder) / "samples.jsonl")
        return self._read[folder]

    def answers(self, record: Record, metric: str) -> Answers:
        """Return the scores of each item's answers, empty when the samples are gone or do not tell them."""
        several = _drawn(record) > 1
        scores: dict[Item, list[float]] = {}
        for sample in self.samples(record):
            value = item_score(sample, metric)
            if value is None:
                return {}
            name = sample["id"].rpartition("/")[0] if several else sample["id"]
            item = (name, json.dumps(sample.get("query")), json.dumps(sample.get("expected")))
            scores.setdefault(item, []).append(value)
        return {item: tuple(values) for item, values in scores.items()}


def item_score(sample: Mapping[str, Any], metric: str) -> float | None:
    """Return one sample's part of `metric`, None where the sample does not tell it.

    That is `scores[metric]`; where it is absent, for `accuracy` whether `answer` is what was expected.
    """
    scores = sample.get("scores")
    if isinstance(scores, Mapping) and isinstance(scores.get(metric), int | float):
        return float(scores[metric])
    if metric == "accuracy" and "answer" in sample and "expected" in sample:
        return float(sample["answer"] == sample["expected"])
    return None


def item_count(sample: Mapping[str, Any], metric: str) -> int:
    """Return how many of the items behind `metric` a sample holds: of a text its blocks, else itself."""
    blocks = sample.get("blocks")
    found = blocks.get(metric) if isinstance(blocks, Mapping) else None
    return len(found) if isinstance(found, Sequence) else 1


def mean_by_item(seeds: Sequence[Answers]) -> Answers:
    """Return each item's answers, the first, second, ... each averaged over the seeds that asked it."""
    by_item: dict[Item, list[tuple[float, ...]]] = {}
    for values in seeds:
        for item, answers in values.items():
            by_item.setdefault(item, []).append(answers)
    return {
        item: tuple(
            statistics.fmean(value for value in column if value is not None) for column in zip_longest(*found)
        )
        for item, found in by_item.items()
    }


def _drawn(record: Record) -> int:
    """Return how many answers were drawn for each question."""
    sampling = (record.get("identity") or {}).get("sampling") or {}
    return sampling.get("samples") or 1
