"""The score of each item, read from samples.jsonl.

Two runs answer the same item when id, query and expected answer agree: the same id alone may stand for
another question under another seed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvexp.report.samples import SampleFile

Record = Mapping[str, Any]
Item = tuple[str, str, str]
Values = dict[Item, float]


@dataclass
class Items:
    """Reads the scores of runs, each folder once."""

    _read: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def values(self, record: Record, metric: str) -> Values:
        """Return the score of each item, empty when the samples are gone or do not tell this metric."""
        folder = record.get("folder")
        if folder is None:
            return {}
        if folder not in self._read:
            self._read[folder] = SampleFile(Path(folder) / "samples.jsonl").read()
        scores: Values = {}
        for sample in self._read[folder]:
            value = item_score(sample, metric)
            if value is None:
                return {}
            scores[sample["id"], json.dumps(sample.get("query")), json.dumps(sample.get("expected"))] = value
        return scores


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


def mean_by_item(seeds: Sequence[Values]) -> Values:
    """Return each item's mean over the seeds that asked it."""
    by_item: dict[Item, list[float]] = {}
    for values in seeds:
        for item, value in values.items():
            by_item.setdefault(item, []).append(value)
    return {item: statistics.fmean(values) for item, values in by_item.items()}
