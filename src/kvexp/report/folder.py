"""The folder of one run, safe against kills and against other starts of the same cell.

config.yaml    resolved configuration
inputs.json    sha256 of the model and the data, so that a run goes on with the same ones only
record.json    the result (`kvexp.report.record`)
samples.jsonl  one line for each document (`kvexp.report.samples`); samples.<rank>.jsonl while others help
latency.json   what each step of decoding took (`kvexp.measure.latency`), where tokens came one by one
memory.json    pointer to the calibration artefact in use
log.txt        what the run said
old-<n>/       the same files of an earlier run that resume=false set aside
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from kvexp.errors import UserError
from kvexp.files import Say, file_lock, read_only, remove_leftovers, sync_folder, tell, write_atomic
from kvexp.measure.latency import LatencyFile
from kvexp.report.record import dump_record
from kvexp.report.samples import SampleFile
from kvexp.report.stored import read_record

Status = Literal["complete", "partial", "new"]

# The record goes first when files are set aside: a kill in between leaves a partial run, never a result
# without samples.
FILES = ("record.json", "samples.jsonl", "latency.json", "memory.json", "inputs.json", "config.yaml")
LOCK = ".lock"


class RunFolder:
    """One run folder. Hold `lock()` around everything that writes; read `status` after the lock is held."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._samples = SampleFile(self.path / "samples.jsonl")
        self.latency = LatencyFile(self.path / "latency.json")

    @contextlib.contextmanager
    def lock(self, say: Say = tell) -> Iterator[None]:
        """Keep other starts of this cell out; they wait, after one line that names who holds the folder.

        A complete run in a folder that is read-only is not locked: nothing is written to it any more.
        """
        if read_only(self.path, LOCK) and self.status == "complete":
            yield
            return
        with file_lock(self.path / LOCK, say):
            remove_leftovers(self.path)
            yield

    @property
    def status(self) -> Status:
        """Return "complete" (there is a result), "partial" (a run was interrupted or failed) or "new".

        A log alone is no run: it is opened before the folder is.

        Raises UserError when record.json cannot be read.
        """
        record = self.record()
        if record is not None and record["status"] == "complete":
            return "complete"
        return "partial" if any((self.path / name).exists() for name in FILES) else "new"

    @property
    def log(self) -> Path:
        """The path of log.txt."""
        return self.path / "log.txt"

    def record(self) -> dict[str, Any] | None:
        """Return the record of a finished or failed run, or None. Raises UserError when it cannot be read."""
        path = self.path / "record.json"
        if not path.exists():
            return None
        try:
            record = read_record(path)
        except ValueError as error:
            raise UserError(
                f"{path} cannot be read ({error}): start with resume=false, which sets it aside"
            ) from error
        return record

    def write_config(self, text: str) -> None:
        """Write config.yaml."""
        write_atomic(self.path / "config.yaml", text.encode())

    def check_inputs(self, hashes: Mapping[str, str]) -> None:
        """Note the hashes of model and data; raise UserError when an interrupted run had others."""
        path = self.path / "inputs.json"
        if path.exists():
            before = self._inputs(path)
            for name, value in hashes.items():
                if before.get(name, value) != value:
                    raise UserError(
                        f"{name} changed since this run was interrupted ({before[name][:12]} before, "
                        f"{value[:12]} now): start with resume=false, which runs the cell anew"
                    )
        write_atomic(path, (json.dumps(dict(hashes), indent=2) + "\n").encode())

    def _inputs(self, path: Path) -> dict[str, str]:
        try:
            before = json.loads(path.read_bytes())
        except ValueError:
            before = None
        if not isinstance(before, dict) or not all(isinstance(value, str) for value in before.values()):
            raise UserError(f"{path} is damaged: start with resume=false, which sets the old files aside")
        return before

    def write_memory(self, pointer: Mapping[str, Any]) -> None:
        """Write memory.json."""
        write_atomic(self.path / "memory.json", (json.dumps(pointer, indent=2) + "\n").encode())

    def write_record(self, record: dict[str, Any]) -> None:
        """Write record.json. Raises ValueError, which names the key, when the record breaks the schema."""
        write_atomic(self.path / "record.json", dump_record(record))

    def samples(self) -> list[dict[str, Any]]:
        """Return the samples on disk in order."""
        return self._samples.read()

    def resume(self, batches: Sequence[Sequence[str]]) -> list[int]:
        """Return which batches of sample ids are to be done; see `SampleFile.resume`."""
        return self._samples.resume(batches)

    def help(self, rank: int, batches: Sequence[Sequence[str]]) -> None:
        """Append to a file of this rank's own from here on: these batches are its share."""
        self._samples = self._samples.shard(rank, batches)

    def settle(self, order: Sequence[str]) -> None:
        """Put all samples into the order of documents; see `SampleFile.settle`."""
        self._samples.settle(order)

    def settled(self, order: Sequence[str]) -> bool:
        """Return whether all samples are there in this order: only the record is missing then."""
        return self._samples.settled(order)

    def append(self, batch: Sequence[Mapping[str, Any]]) -> None:
        """Append the samples of a planned batch; see `SampleFile.append`."""
        self._samples.append(batch)

    def set_aside(self) -> Path | None:
        """Move the files of an earlier run to `old-<n>/` and return that folder; None without such files.

        log.txt is copied there and emptied.
        """
        names = (*FILES, *(path.name for path in self._samples.shards()))
        present = [name for name in names if (self.path / name).exists()]
        if not present:
            return None
        taken = [int(path.name[4:]) for path in self.path.glob("old-*") if path.name[4:].isdecimal()]
        aside = self.path / f"old-{max(taken, default=0) + 1}"
        aside.mkdir()
        for name in present:
            os.replace(self.path / name, aside / name)
        if self.log.exists():  # this run has it open already, and would write on in a file that was moved
            shutil.copyfile(self.log, aside / self.log.name)
            os.truncate(self.log, 0)
        sync_folder(aside)
        sync_folder(self.path)
        return aside


class ReadFolder(RunFolder):
    """The folder of a process that does what another does that writes: it writes no sample."""

    def help(self, rank: int, batches: Sequence[Sequence[str]]) -> None:
        """Append nowhere."""

    def append(self, batch: Sequence[Mapping[str, Any]]) -> None:
        """Leave the samples to the other process."""
