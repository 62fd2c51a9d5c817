"""bbh_geometric_shapes: which shape an SVG path draws, one of up to eleven options (Suzgun et al., 2022)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvexp.tasks.datasets import load_rows
from kvexp.tasks.labels import Row
from kvexp.tasks.published import PublishedTask

N_TRAIN = 150  # of 250, as ManyICLBench takes them; the rest is the test


@dataclass(frozen=True)
class BbhGeometricShapes(PublishedTask):
    """The labels are the letters of the options, which mean other shapes in other questions.

    `source`: where the rows are read without a data folder. The published set is one list of 250, which is
    parted here: the hub's by a random order of ours, a folder's as it has been parted.
    """

    id: ClassVar[str] = "bbh_geometric_shapes"
    header: ClassVar[str] = "Name the shape that each path draws by the letter of its option.\n"
    query_word: ClassVar[str] = "Input"
    answer_word: ClassVar[str] = "Target"
    lines: ClassVar[bool] = True

    n_calibration: int = 10
    n_validation: int = 20
    source: str = "hf://datasets/lukaemon/bbh"

    def _rows(self, split: str, data_dir: str | None) -> list[Row]:
        records = self._records(split, data_dir)
        return [Row(f"{split}-{i}", row["question"], row["answer"]) for i, row in enumerate(records)]

    def _records(self, split: str, data_dir: str | None) -> Sequence[dict[str, Any]]:
        records = load_rows(self.id, split, data_dir, ("question", "answer"), source=self.source)
        if "index" in records[0]:  # of a folder, where it says the place in the published list
            return records
        random.Random(self.id).shuffle(records)
        return records[:N_TRAIN] if split == "train" else records[N_TRAIN:]
