"""Rows of the published sets: from a folder, or from the hub of datasets.

A folder has `<name>/<split>.jsonl.gz`: one JSON object a line, for label sets with the fields `text` and
`label` (trec also `coarse` and `fine`), for problems `question` and `answer` and what else is known. It may
hold fewer rows than were published; nothing is filled in from the hub.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvexp.errors import UserError

PARQUET = "refs/convert/parquet"


@dataclass(frozen=True)
class Source:
    """Where the hub keeps a set, and our field for each column; rows with a label in `skip` are left out.

    `split` is the hub's name for the one split of a set, where that is not `test`.
    """

    hub_id: str
    config: str | None
    columns: Mapping[str, str] = field(hash=False)
    skip: tuple[str, ...] = ()
    split: str | None = None


_PROBLEM = {"problem": "question", "answer": "answer"}


SOURCES = {
    "banking77": Source("PolyAI/banking77", None, {"text": "text", "label": "label"}),
    "clinc150": Source("clinc/clinc_oos", "plus", {"text": "text", "intent": "label"}, skip=("oos",)),
    "trec": Source("CogComp/trec", None, {"text": "text", "coarse_label": "coarse", "fine_label": "fine"}),
    "aime24": Source("HuggingFaceH4/aime_2024", None, {**_PROBLEM, "id": "id"}, split="train"),
    "aime25": Source("math-ai/aime25", None, {**_PROBLEM, "id": "id"}),
    "bbh_geometric_shapes": Source(
        "lukaemon/bbh", "geometric_shapes", {"input": "question", "target": "answer"}, split="test"
    ),
    "math_counting_and_probability": Source(
        "EleutherAI/hendrycks_math",
        "counting_and_probability",
        {"problem": "question", "solution": "solution", "level": "level"},
    ),
    "math500": Source(
        "HuggingFaceH4/MATH-500",
        None,
        {**_PROBLEM, "unique_id": "id", "subject": "subject", "level": "level"},
    ),
}


def load_rows(
    name: str,
    split: str,
    data_dir: str | None = None,
    fields: Sequence[str] = (),
    source: str | None = None,
) -> list[dict[str, str]]:
    """Return the rows of a set in published order, with the fields that its files have.

    Args:
        name: a key of SOURCES.
        split: train or test.
        data_dir: the folder; None: the environment variable KVEXP_DATA_DIR, or the hub where that is unset.
        fields: the fields that every row of a folder must have.
        source: a mirror of the set on the hub, "hf://datasets/ORG/NAME"; None: its own place there.

    Raises:
        UserError: the folder lacks the file, a row lacks a field, or the hub cannot be read.
    """
    folder = data_dir or os.environ.get("KVEXP_DATA_DIR")
    if folder:
        path = Path(folder).expanduser() / name / f"{split}.jsonl.gz"
        rows = _read_file(path, folder)
        _need_fields(rows, fields, path)
        return rows
    return _read_hub(name, split, source)


def _read_file(path: Path, folder: str) -> list[dict[str, str]]:
    if not path.is_file():
        raise UserError(
            f"data_dir={folder} has no {path.parent.name}/{path.name}: "
            "set data_dir=PATH to a folder that has it"
        )
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines if line.strip()]
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({_first_line(error)}): fetch it again") from error
    if not rows:
        raise UserError(f"{path} holds no row: fetch it again")
    return rows


def _need_fields(rows: Sequence[Any], fields: Sequence[str], path: Path) -> None:
    for number, row in enumerate(rows, 1):
        for key in fields:
            if not isinstance(row, dict) or not isinstance(row.get(key), str):
                raise UserError(f"{path} has no text '{key}' in row {number}: fetch it again")


def _read_hub(name: str, split: str, mirror: str | None) -> list[dict[str, str]]:
    import datasets

    source = SOURCES[name]
    if mirror:
        source = replace(source, hub_id=mirror.removeprefix("hf://datasets/"))
    try:
        table = _load_table(datasets, source, source.split or split)
    except Exception as error:
        raise UserError(
            f"{source.hub_id} cannot be read from the hub ({_first_line(error)}): "
            f"set data_dir=PATH to a folder that has {name}/{split}.jsonl.gz"
        ) from error
    return list(_rows(table, source))


def hub_table(source: str, config: str, split: str, member: str) -> Any:
    """Return the rows of a part of a set on the hub ("hf://datasets/ORG/NAME") as they are there.

    Raises UserError where it cannot be read, which names the `member` of a data folder that serves instead.
    """
    import datasets

    try:
        return datasets.load_dataset(source.removeprefix("hf://datasets/"), config, split=split)
    except Exception as error:  # the hub's client has many of its own
        raise UserError(
            f"{source} cannot be read from the hub ({_first_line(error)}): set data_dir=PATH to a folder that"
            f" has {member}"
        ) from error


def _load_table(datasets: Any, source: Source, split: str) -> Any:
    """Load a split; a set that is published as a script is read from the hub's own conversion of it."""
    try:
        return datasets.load_dataset(source.hub_id, source.config, split=split)
    except RuntimeError as error:
        if "script" not in str(error):
            raise
    return datasets.load_dataset(source.hub_id, split=split, revision=PARQUET)


def _rows(table: Any, source: Source) -> Iterable[dict[str, str]]:
    names: dict[str, Any] = {
        column: getattr(table.features[column], "names", None) for column in source.columns
    }
    for record in table:
        row = {
            ours: names[column][record[column]] if names[column] else str(record[column])
            for column, ours in source.columns.items()
        }
        if "fine" in row:
            row["label"] = row["fine"]
        if row.get("label") not in source.skip:
            yield row


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
