"""Single files of benchmarks: from a data folder, or as their authors publish them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kvexp.embedded import cache_folder
from kvexp.errors import UserError
from kvexp.files import write_atomic
from kvexp.tasks.texts import data_file, read_gzip, read_jsonl

_HUB = "hf://datasets/"
_GITHUB = "gh://"


def load_records(data_dir: str | None, member: str, url: str) -> tuple[Path, list[dict[str, Any]]]:
    """Return the records of a set, and the path of the file that they were read from.

    Where a data folder is set (None: by KVEXP_DATA_DIR), they are its file `member`, one JSON object a line,
    gzipped. Otherwise they are the file at `url`, a JSON list or one object a line, which is fetched once:
    from the hub of datasets into its own cache ("hf://datasets/ORG/NAME/FILE"), or else into ours, from
    GitHub ("gh://OWNER/REPOSITORY/BRANCH/FILE") or a plain address. Raises UserError when neither can be
    read.
    """
    folder = data_dir or os.environ.get("KVEXP_DATA_DIR")
    if folder:
        path = data_file(data_dir, member)
        if path is None:
            raise UserError(f"data_dir={folder} has no {member}: set data_dir=PATH to a folder that has it")
        return path, read_jsonl(path)
    path = _fetched(url, member)
    try:
        text = path.read_text(encoding="utf-8")
        listed = text.lstrip().startswith("[")
        rows = json.loads(text) if listed else [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): remove it, so that it is fetched again") from error
    return path, rows


def load_text(data_dir: str | None, member: str, url: str) -> str:
    """Return the text of a file that is found as those of `load_records` are."""
    if data_dir or os.environ.get("KVEXP_DATA_DIR"):
        path = data_file(data_dir, member)
        if path is None:
            folder = data_dir or os.environ["KVEXP_DATA_DIR"]
            raise UserError(f"data_dir={folder} has no {member}: set data_dir=PATH to a folder that has it")
        return read_gzip(path)
    return _fetched(url, member).read_text(encoding="utf-8")


def _fetched(url: str, member: str) -> Path:
    try:
        if url.startswith(_HUB):
            return _from_hub(url.removeprefix(_HUB))
        return _from_web(url, member.split("/")[0])
    except Exception as error:  # the hub's client has many of its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{url} cannot be read ({reason}): set data_dir=PATH to a folder that has {member}"
        ) from error


def _from_hub(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    organisation, data_set, file = name.split("/", 2)
    return Path(hf_hub_download(f"{organisation}/{data_set}", file, repo_type="dataset"))


def _from_web(url: str, name: str) -> Path:
    from urllib.request import urlopen

    path = cache_folder() / "data" / name / url.rsplit("/", 1)[-1]
    if not path.is_file():
        address = url.replace(_GITHUB, "https://raw.githubusercontent.com/", 1)
        with urlopen(address, timeout=120) as answer:
            data = answer.read()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
    return path
