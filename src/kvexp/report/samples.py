"""`samples.jsonl`: one line for each document, in the order of the plan, appended batch by batch.

A run that is killed and started again repeats the batch it was in and no other, so its file ends up equal,
byte for byte, to that of a run that nobody interrupted. That needs a canonical form: a fixed order of keys,
floats rounded to 1e-4, and no number that JSON does not have.
"""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvexp.errors import UserError
from kvexp.files import sync_folder, write_atomic

FIELDS = (
    "id",
    "sample",
    "seed",
    "query",
    "answer",
    "answer_calibrated",
    "answer_free",
    "expected",
    "scores",
    "prompt_tokens",
    "new_tokens",
    "stop",
)
DECIMALS = 4


def canonical(value: Any) -> Any:
    """Return `value` as plain JSON data with sorted keys and floats rounded to 1e-4.

    NumPy scalars count as numbers. Raises ValueError for a number that is not finite: a NaN score is a fault
    of the run, not a result.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"{number} is not a finite number")
        return round(number, DECIMALS) + 0.0  # + 0.0 turns -0.0 into 0.0
    if isinstance(value, Mapping):
        return {str(key): canonical(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, Sequence):
        return [canonical(item) for item in value]
    raise ValueError(f"{type(value).__name__} is not plain data")


def line(sample: Mapping[str, Any]) -> bytes:
    """Return the line of `sample`: the known fields first, in the order of `FIELDS`, then others by name."""
    if not isinstance(sample.get("id"), str):
        raise ValueError(f"a sample needs a string as id, not {sample.get('id')!r}")
    try:
        plain = canonical(sample)
    except ValueError as error:
        raise ValueError(f"sample {sample['id']!r}: {error}") from error
    ordered = {key: plain[key] for key in FIELDS if key in plain}
    ordered.update({key: plain[key] for key in plain if key not in ordered})
    # A lone surrogate (a broken character in the data) becomes its JSON escape, which reads back as the same
    # string.
    return json.dumps(ordered, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


class SampleFile:
    """An append-only file of samples that follows a plan of batches.

    `resume` states the plan and says how many of its batches the file already holds; `append` adds the next
    one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._plan: list[list[str]] | None = None
        self._done = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the samples on disk in order, without a torn last line."""
        return [json.loads(row) for row in self._whole_lines()]

    def resume(self, batches: Sequence[Sequence[str]]) -> int:
        """Return how many leading batches of ids are on disk, and cut off what follows them.

        What follows may only be the beginning of the next batch, its last line torn or not. Raises UserError
        when a line holds another id than the plan has at that place, ValueError when the plan names an id
        twice.
        """
        plan = [list(batch) for batch in batches]
        expected = [sample_id for batch in plan for sample_id in batch]
        if len(set(expected)) != len(expected):
            raise ValueError("the plan names a sample twice")
        lines = self._whole_lines()
        matching = self._count_matching(lines, expected)
        done, kept = 0, 0
        while done < len(plan) and kept + len(plan[done]) <= matching:
            kept += len(plan[done])
            done += 1
        next_size = len(plan[done]) if done < len(plan) else 0
        if matching < len(lines) and len(lines) > kept + next_size:
            raise self._refusal(f"line {matching + 1} of {self.path} is damaged")
        self._cut(sum(len(row) for row in lines[:kept]))
        self._plan, self._done = plan, done
        return done

    def append(self, batch: Sequence[Mapping[str, Any]]) -> None:
        """Write the lines of the next planned batch and wait until they are on the disk.

        Raises ValueError when `resume` was not called or the ids are not those of the next batch.
        """
        if self._plan is None:
            raise ValueError("call resume(batches) before append(batch)")
        ids = [sample.get("id") for sample in batch]
        if self._done == len(self._plan) or ids != self._plan[self._done]:
            raise ValueError(f"batch {self._done} of the plan was expected, not {ids}")
        data = b"".join(line(sample) for sample in batch)
        new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync_folder(self.path.parent)
        self._done += 1

    def settle(self, order: Sequence[str]) -> None:
        """Put all samples of the plan, which are on disk, into the order of documents, atomically."""
        rows = {json.loads(row)["id"]: row for row in self._whole_lines()}
        if sorted(rows) != sorted(order):
            raise ValueError(f"{self.path} does not hold exactly the samples that are to be ordered")
        write_atomic(self.path, b"".join(rows[sample_id] for sample_id in order))

    def settled(self, order: Sequence[str]) -> bool:
        """Return whether the file holds exactly these samples in this order."""
        lines = self._whole_lines()
        try:
            return len(lines) == len(order) and [json.loads(row)["id"] for row in lines] == list(order)
        except (ValueError, KeyError, TypeError):
            return False

    def _whole_lines(self) -> list[bytes]:
        """Return the lines with their line feeds; what follows the last line feed is torn."""
        data = self.path.read_bytes() if self.path.exists() else b""
        return [row + b"\n" for row in data.split(b"\n")[:-1]]

    def _count_matching(self, lines: list[bytes], expected: list[str]) -> int:
        """Return how many leading lines hold the expected ids, up to the first damaged line."""
        for index, row in enumerate(lines):
            try:
                found = json.loads(row)["id"]
            except (ValueError, KeyError, TypeError):
                return index
            if index == len(expected):
                raise self._refusal(f"{self.path} holds more samples than the {len(expected)} of this run")
            if found != expected[index]:
                wanted = expected[index]
                raise self._refusal(f"line {index + 1} of {self.path} is {found!r}, not {wanted!r}")
        return len(lines)

    def _refusal(self, problem: str) -> UserError:
        return UserError(f"{problem}: start with resume=false, which sets the old files aside")

    def _cut(self, size: int) -> None:
        if self.path.exists() and self.path.stat().st_size != size:
            with open(self.path, "r+b") as file:
                file.truncate(size)
                os.fsync(file.fileno())
