"""`samples.jsonl`: one line for each document, appended batch by batch, at the end in order of documents.

A run that is killed and started again repeats the batch it was in and no other, so its file ends up equal,
byte for byte, to that of a run that nobody interrupted. That needs a canonical form: a fixed order of keys,
floats rounded to 1e-4, and no number that JSON does not have.
"""

from __future__ import annotations

import json
import logging
import math
import numbers
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
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

log = logging.getLogger(__name__)


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

    `resume` states the plan and says which of its batches are still to be done; `append` adds one of them.
    With several processes each has a file of its own beside `samples.jsonl` (`shard`), and `resume` and
    `settle`, which the first of them calls, bring all together.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._left: set[tuple[str, ...]] | None = None  # the batches that are to come

    def shard(self, rank: int, batches: Sequence[Sequence[str]]) -> SampleFile:
        """Return the file of another process, for those of the plan's batches that it does."""
        other = SampleFile(self.path.with_suffix(f".{rank}{self.path.suffix}"))
        other._left = {tuple(batch) for batch in batches}
        return other

    def shards(self) -> list[Path]:
        """Return the files of other processes, of this run or of an interrupted one."""
        found = self.path.parent.glob(f"{self.path.stem}.*{self.path.suffix}")
        return sorted(path for path in found if path.suffixes[0][1:].isdecimal())

    def read(self) -> list[dict[str, Any]]:
        """Return the samples in the file in order, without a torn last line."""
        return [json.loads(row) for row in _lines(self.path)]

    def resume(self, batches: Sequence[Sequence[str]]) -> list[int]:
        """Return which batches of ids are not whole on disk, and keep the others alone, in order of the plan.

        A file with a line that cannot be read is set aside as `<name>.damaged-<n>`, and what that line held
        is to be done again. Raises UserError for a sample that is not of the plan, ValueError when the plan
        names an id twice.
        """
        plan = [tuple(batch) for batch in batches]
        expected = {sample_id for batch in plan for sample_id in batch}
        if len(expected) != sum(map(len, plan)):
            raise ValueError("the plan names a sample twice")
        found: dict[str, bytes] = {}
        for path in (self.path, *self.shards()):
            for sample_id, row in self._readable(path, expected).items():
                found.setdefault(sample_id, row)
        left = [number for number, batch in enumerate(plan) if not all(one in found for one in batch)]
        missing = {plan[number] for number in left}
        self._keep(b"".join(found[one] for batch in plan if batch not in missing for one in batch))
        self._left = missing
        return left

    def append(self, batch: Sequence[Mapping[str, Any]]) -> None:
        """Write the lines of a planned batch and wait until they are on the disk.

        Raises ValueError when `resume` was not called or the ids are not those of a batch that is to come.
        """
        if self._left is None:
            raise ValueError("call resume(batches) before append(batch)")
        ids = tuple(str(sample.get("id")) for sample in batch)
        if ids not in self._left:
            raise ValueError(f"no batch of the plan that is still to come has the ids {list(ids)}")
        data = b"".join(line(sample) for sample in batch)
        new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync_folder(self.path.parent)
        self._left.remove(ids)

    def settle(self, order: Sequence[str]) -> None:
        """Put all samples of the plan, which are on disk, into the order of documents, atomically."""
        paths = [self.path, *self.shards()]
        rows = {json.loads(row)["id"]: row for path in paths for row in _lines(path)}
        if sorted(rows) != sorted(order):
            raise ValueError(f"{self.path} does not hold exactly the samples that are to be ordered")
        self._keep(b"".join(rows[sample_id] for sample_id in order))

    def settled(self, order: Sequence[str]) -> bool:
        """Return whether the file holds exactly these samples in this order."""
        return [_id(row) for row in _lines(self.path)] == list(order)

    def _readable(self, path: Path, expected: Collection[str]) -> dict[str, bytes]:
        """Return the lines of a file by id; the file is copied where one of them says nothing."""
        rows = _lines(path)
        ids = [_id(row) for row in rows]
        for number, found in enumerate(ids, 1):
            if found is not None and found not in expected:
                raise UserError(
                    f"line {number} of {path} is {found!r}, which is not a sample of this run: start with"
                    " resume=false, which sets the old files aside"
                )
        if None in ids:
            aside = _unused(path)
            shutil.copyfile(path, aside)
            log.warning(
                "line %d of %s cannot be read: it is kept as %s, and done again",
                ids.index(None) + 1,
                path,
                aside.name,
            )
        return {found: row for found, row in zip(ids, rows, strict=True) if found is not None}

    def _keep(self, content: bytes) -> None:
        """Leave `content` in the file, and nothing in those of other processes."""
        before = self.path.read_bytes() if self.path.exists() else b""
        if before != content and before.startswith(content):
            with open(self.path, "r+b") as file:
                file.truncate(len(content))
                os.fsync(file.fileno())
        elif before != content:
            write_atomic(self.path, content)
        for path in self.shards():
            path.unlink(missing_ok=True)


def _lines(path: Path) -> list[bytes]:
    """Return the lines of a file with their line feeds; what follows the last line feed is torn."""
    data = path.read_bytes() if path.exists() else b""
    return [row + b"\n" for row in data.split(b"\n")[:-1]]


def _id(row: bytes) -> str | None:
    """Return the id of a line, None where it cannot be read."""
    try:
        found = json.loads(row)["id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _unused(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return aside
