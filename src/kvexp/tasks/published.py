"""Label tasks over published sets, in the many-shot prompt format of ManyICLBench (Zou et al., 2024).

Underscores in labels become spaces. The published benchmark has no description line (`description=false`) and
200 test queries drawn by its authors; here the test queries are all published test rows, or `n_test` of them.

Train rows that repeat another one or a test row (same words, whatever the case and spacing) are left out.
What remains is parted in an order that no seed changes: calibration queries, validation, and the rest. A seed
shuffles the rest; the context takes the first of it and the traces come from what is left.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvexp.errors import UserError
from kvexp.tasks.base import at_least, at_most
from kvexp.tasks.datasets import load_rows
from kvexp.tasks.labels import LabelTask, Row, normalise, rows_sha256


@dataclass(frozen=True)
class PublishedTask(LabelTask):
    """A published set and its knobs.

    `n_labels`: use a subset of so many labels, drawn by `label_seed` from the names, sorted
    whatever their case (null: all).
    `n_test`: test queries, in an order that no seed changes (null: all test rows of those labels).
    `n_validation`: train rows held out for `split=validation`.
    """

    label_field: ClassVar[str] = "label"

    n_labels: int | None = None
    label_seed: int = 5
    n_test: int | None = None
    n_validation: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("task.n_labels", self.n_labels, 2)
        at_least("task.n_test", self.n_test, 1)
        at_least("task.n_validation", self.n_validation, 1)

    def field(self) -> str:
        """Return the field of the data that holds the label."""
        return self.label_field

    def draw(self, tokenizer: Any, seed: int, split: str, data_dir: str | None) -> PublishedDraw:
        """Part the rows of the chosen labels; no part depends on the tokenizer."""
        train, test = (self._rows(name, data_dir) for name in ("train", "test"))
        labels = self._labels(train)
        chosen = [row for row in test if row.label in labels]
        at_most("task.n_test", self.n_test, len(chosen))
        random.Random(f"{self.id}/test").shuffle(chosen)
        pool = _distinct([row for row in train if row.label in labels], without=test)
        random.Random(f"{self.id}/held-out").shuffle(pool)
        held_out = self.n_calibration + self.n_validation
        if len(pool) <= held_out:
            raise UserError(
                f"task={self.id} has {len(pool)} train rows of these labels, too few to hold out {held_out}: "
                "lower task.n_validation or task.n_calibration, or raise task.n_labels"
            )
        rest = pool[held_out:]
        random.Random(f"{self.id}/{seed}/demonstrations").shuffle(rest)
        return PublishedDraw(
            stream=f"{self.id}/{seed}",
            labels=tuple(sorted(map(_shown, labels))),
            queries=_as_shown(
                chosen[: self.n_test] if split == "test" else pool[self.n_calibration : held_out]
            ),
            calibration=_as_shown(pool[: self.n_calibration]),
            rest=_as_shown(rest),
            sha256=rows_sha256(train, test),
        )

    def data_sha256(self, data_dir: str | None) -> str | None:
        """See `Task.data_sha256`; the hub is not asked."""
        if data_dir is None:
            return None
        try:
            return rows_sha256(self._rows("train", data_dir), self._rows("test", data_dir))
        except UserError:  # the files are gone: nothing to compare with
            return None

    def _rows(self, split: str, data_dir: str | None) -> list[Row]:
        records = load_rows(self.id, split, data_dir, ("text", self.field()))
        return [Row(f"{split}-{i}", row["text"], row[self.field()]) for i, row in enumerate(records)]

    def _labels(self, train: Sequence[Row]) -> set[str]:
        names = sorted({row.label for row in train}, key=lambda name: (name.lower(), name))
        at_most("task.n_labels", self.n_labels, len(names))
        return set(random.Random(self.label_seed).sample(names, self.n_labels) if self.n_labels else names)


@dataclass(frozen=True)
class PublishedDraw:
    """What a seed draws: `rest` holds the demonstrations, then the traces, those that the context leaves."""

    stream: str
    labels: tuple[str, ...]
    queries: tuple[Row, ...]
    calibration: tuple[Row, ...]
    rest: tuple[Row, ...]
    sha256: str

    def demonstrations(self) -> Sequence[Row]:
        """Rows in the order of the seed."""
        return self.rest

    def traces(self, context: Sequence[Row], n: int, seed: int) -> list[Row]:
        """Rows that are not in the context."""
        used = {row.id for row in context}
        rows = [row for row in self.rest if row.id not in used]
        random.Random(f"{self.stream}/{seed}/traces").shuffle(rows)
        return rows[:n]


def _distinct(rows: Sequence[Row], without: Sequence[Row]) -> list[Row]:
    """Return the rows whose text is neither that of an earlier row nor in `without`."""
    seen = {normalise(row.text) for row in without}
    kept = []
    for row in rows:
        key = normalise(row.text)
        if key not in seen:
            seen.add(key)
            kept.append(row)
    return kept


def _as_shown(rows: Sequence[Row]) -> tuple[Row, ...]:
    return tuple(row._replace(label=_shown(row.label)) for row in rows)


def _shown(label: str) -> str:
    return label.replace("_", " ")
