"""Every run below some folders, the broken and unfinished ones too: nothing is dropped in silence."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvexp.errors import UserError
from kvexp.report.folder import FILES
from kvexp.report.items import item_count, item_score
from kvexp.report.stored import check_shown, read_record, read_samples

Kind = Literal["failed", "partial", "broken", "repeated", "lost"]
KINDS: Mapping[Kind, str] = {
    "failed": "ended with an error",
    "partial": "has no result: it was interrupted, or is running",
    "broken": "cannot be read, and is left out",
    "repeated": "holds the same cell as a later run, and is left out",
    "lost": "has a result whose samples cannot be read",
}
ASIDE = "old-"


@dataclass(frozen=True)
class Problem:
    """A run folder that is not, or not wholly, part of the result, and why."""

    kind: Kind
    folder: str
    reason: str


@dataclass
class Collected:
    """The records that were read, each with its folder under the key "folder", and what else was there."""

    records: list[dict[str, Any]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def only(self, kept: Sequence[Mapping[str, Any]]) -> Collected:
        """Return the same with these records alone, without the failures of others."""
        folders = {record["folder"] for record in kept}
        dropped = {record["folder"] for record in self.records} - folders
        return Collected([*map(dict, kept)], [p for p in self.problems if p.folder not in dropped])


def collect(folders: Sequence[str | Path]) -> Collected:
    """Return what lies below `folders`.

    Of two runs of one cell the one that finished later counts. Files that resume=false set aside (`old-<n>/`)
    are no runs. Raises UserError for a folder that is not there, or when there is no run at all.
    """
    found = Collected()
    seen: set[Path] = set()
    for folder in folders:
        if not Path(folder).is_dir():
            raise UserError(f"{folder} is no folder: name one that holds runs, such as outputs")
        for run in _run_folders(Path(folder)):
            if run.resolve() not in seen:
                seen.add(run.resolve())
                _read(run, found)
    _keep_latest(found)
    if not found.records and not found.problems:
        names = " and ".join(map(str, folders))
        raise UserError(f"there is no run below {names}: run a cell first, such as python -m kvexp budget=1k")
    return found


def _run_folders(top: Path) -> Iterator[Path]:
    """Yield the folders that hold a file of a run, sorted; a log alone is none."""
    for parent, folders, names in os.walk(top, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith((ASIDE, ".")))
        if set(names) & set(FILES):
            folders.clear()  # a run folder holds no other
            yield Path(parent)


def _read(run: Path, found: Collected) -> None:
    path = run / "record.json"
    if not path.exists():
        lines = _sample_lines(run)
        found.problems.append(Problem("partial", str(run), f"{lines} samples on disk"))
        return
    try:
        record = read_record(path)
        check_shown(record)
    except (OSError, ValueError) as error:
        found.problems.append(Problem("broken", str(run), f"record.json: {error}"))
        return
    try:
        _check_whole(record, run / "samples.jsonl")
    except (OSError, ValueError) as error:
        found.problems.append(Problem("lost", str(run), f"samples.jsonl: {error}"))
        found.records.append({**record, "folder": str(run), "samples": False})
    else:
        found.records.append({**record, "folder": str(run)})
    if record["status"] == "failed":
        found.problems.append(Problem("failed", str(run), record["error"]))


def _check_whole(record: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError unless the samples can be read, and are as many as a complete record says."""
    samples = read_samples(path)
    if record["status"] != "complete" or not path.exists():
        return
    if _torn(path):
        raise ValueError("its last line is torn")
    if not samples:
        return
    for name, metric in record["metrics"].items():
        if item_score(samples[0], name) is None:
            continue
        items = sum(item_count(sample, name) for sample in samples)
        if items < metric["n"]:
            raise ValueError(f"it holds {items} of {metric['n']} items")


def _torn(path: Path) -> bool:
    with open(path, "rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _sample_lines(run: Path) -> int:
    files = (path for path in run.glob("samples*.jsonl") if path.is_file())  # and those of ranks
    return sum(path.read_bytes().count(b"\n") for path in files)


def _keep_latest(found: Collected) -> None:
    """Leave one record of each cell: a complete one before a failed one, then the one that finished last."""
    best: dict[str, dict[str, Any]] = {}
    for record in found.records:
        other = best.setdefault(record["cell"], record)
        if _age(record) > _age(other):
            best[record["cell"]] = record
    for record in found.records:
        kept = best[record["cell"]]
        if kept is not record:
            reason = f"{kept['folder']} is the later one"
            found.problems = [p for p in found.problems if p.folder != record["folder"]]
            found.problems.append(Problem("repeated", record["folder"], reason))
    found.records = [record for record in found.records if best[record["cell"]] is record]


def _age(record: Mapping[str, Any]) -> tuple[bool, str]:
    provenance = record["provenance"]
    time = provenance.get("finished") or provenance.get("started") or ""
    return record["status"] == "complete", str(time)
