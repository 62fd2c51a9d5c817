"""Long plain texts by name: prose, code, markup and dialogue, to fill contexts and to calibrate on.

`stdlib` and `stdlib_code` come with the installed Python, so they need no download, and change with its
version. The other names are files of a data folder. Anything else is the path of a file or folder of texts.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvexp.errors import UserError, suggest
from kvexp.tasks import texts_stdlib
from kvexp.tasks.labels import rows_sha256

ESSAYS = "ruler/essays.jsonl.gz"
_SUFFIXES = (".txt", ".md")
_ARTICLE = re.compile(r"^ \n = ([^=].*[^=]|[^=]) = \n(?= \n)", re.MULTILINE)
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s+(?=[\"'(\[]*[A-Z0-9])")


@dataclass(frozen=True)
class Text:
    """A text and the name of the file, module, article or conversation that it is."""

    name: str
    text: str


def load_texts(source: str, data_dir: str | None = None) -> list[Text]:
    """Return the texts of a source, in an order that never changes.

    Args:
        source: "stdlib" (documentation strings of Python's own modules, only their paragraphs of prose),
            "stdlib_code" (the modules themselves), "essays", "wikitext2" (articles), "tinyshakespeare",
            "code", "html", "dialogue" (conversations of LoCoMo, "Speaker: text" under the session's date);
            or the path of a .txt file, or of a folder of .txt and .md files.
        data_dir: the folder of the files; None: the environment variable KVEXP_DATA_DIR.

    Raises:
        UserError: the source is unknown, its files are missing or unreadable, or they hold no text.
    """
    if source in ("stdlib", "stdlib_code"):
        texts = list(_of_python(source))
    elif source in _READERS:
        member, read = _READERS[source]
        texts = list(read(_needed(source, data_dir, member)))
    else:
        texts = list(_of_path(source))
    kept = [text for text in texts if text.text.strip()]
    if not kept:
        raise UserError(f"the source {source} holds no text: name one of {', '.join(SOURCES)}")
    return kept


def texts_sha256(texts: Iterable[Text]) -> str:
    """Return the sha256 of the names and texts, order included."""
    return rows_sha256([text.name, text.text] for text in texts)


def sentences(text: str) -> list[str]:
    """Part a text at the ends of its sentences; each part keeps the space after it, so they join to `text`.

    A sentence ends at `.`, `!` or `?` (and closing quotes or brackets) before a space and a capital letter or
    digit. Unlike a trained splitter this also parts after an abbreviation such as "Mr. Smith".
    """
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True) if a < b]


def data_file(data_dir: str | None, member: str) -> Path | None:
    """Return the path of a file in the data folder; None where there is no folder or no such file."""
    folder = data_dir or os.environ.get("KVEXP_DATA_DIR")
    path = Path(folder).expanduser() / member if folder else None
    return path if path is not None and path.is_file() else None


def read_gzip(path: Path) -> str:
    """Return the text of a .gz file; raises UserError when it cannot be read."""
    try:
        return gzip.decompress(path.read_bytes()).decode("utf-8")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}): fetch it again") from error


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a .jsonl.gz file; raises UserError when it cannot be read."""
    try:
        rows = [json.loads(line) for line in read_gzip(path).split("\n") if line.strip()]
    except ValueError as error:
        raise UserError(f"{path} cannot be read ({error}): fetch it again") from error
    if not rows:
        raise UserError(f"{path} holds no row: fetch it again")
    if not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} has a row that is no object: fetch it again")
    return rows


@cache
def _of_python(source: str) -> tuple[Text, ...]:
    pairs = texts_stdlib.prose() if source == "stdlib" else texts_stdlib.code()
    return tuple(Text(name, text) for name, text in pairs)


def _needed(source: str, data_dir: str | None, member: str) -> Path:
    path = data_file(data_dir, member)
    if path is None:
        folder = data_dir or os.environ.get("KVEXP_DATA_DIR")
        lacking = (
            f"data_dir={folder} has no {member}" if folder else f"no data_dir is set to find {member} in"
        )
        raise UserError(
            f"the texts of {source} cannot be read, since {lacking}: set data_dir=PATH to a folder that has"
            " it, or take the texts of stdlib"
        )
    return path


def _rows(path: Path) -> Iterator[Text]:
    for row in read_jsonl(path):
        yield Text(_field(path, row, "file"), _field(path, row, "text"))


def _whole(path: Path) -> Iterator[Text]:
    yield Text(path.parent.name, read_gzip(path))


def _articles(path: Path) -> Iterator[Text]:
    """Split a wikitext file at its headings of the first level, which have empty lines around them."""
    _, *parts = _ARTICLE.split(read_gzip(path))
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        yield Text(title, body.strip() + "\n")


def _conversations(path: Path) -> Iterator[Text]:
    for row in read_jsonl(path):
        talk = row.get("conversation")
        if not isinstance(talk, dict):
            raise UserError(f"{path} has a row without a conversation: fetch it again")
        numbers = sorted(int(key.split("_")[1]) for key in talk if re.fullmatch(r"session_\d+", key))
        sessions = [
            "\n".join(
                [
                    talk[f"session_{number}_date_time"],
                    *(f"{turn['speaker']}: {' '.join(turn['text'].split())}" for turn in turns),
                ]
            )
            for number in numbers
            if (turns := talk[f"session_{number}"])
        ]
        yield Text(_field(path, row, "sample_id"), "\n\n".join(sessions) + "\n")


def _of_path(source: str) -> Iterator[Text]:
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
        if not files:
            raise UserError(f"the folder {source} has no .txt or .md file: name one that has")
        names = [str(file.relative_to(path)) for file in files]
    elif path.is_file() and path.suffix in _SUFFIXES:
        files, names = [path], [path.name]
    else:
        raise UserError(
            f"no texts are called {source}{suggest(source, SOURCES)}: name one of {', '.join(SOURCES)},"
            " or the path of a .txt file or of a folder of them"
        )
    for name, file in zip(names, files, strict=True):
        try:
            yield Text(name, file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read as text ({error}): name another file") from error


def _field(path: Path, row: dict[str, Any], key: str) -> str:
    found = row.get(key)
    if not isinstance(found, str):
        raise UserError(f"{path} has a row without the text '{key}': fetch it again")
    return found


_READERS: dict[str, tuple[str, Callable[[Path], Iterator[Text]]]] = {
    "essays": (ESSAYS, _rows),
    "wikitext2": ("calibration_wikitext2/test.txt.gz", _articles),
    "tinyshakespeare": ("calibration_tinyshakespeare/train.txt.gz", _whole),
    "code": ("calibration_code/train.jsonl.gz", _rows),
    "html": ("calibration_html/train.jsonl.gz", _rows),
    "dialogue": ("locomo/test.jsonl.gz", _conversations),
}
SOURCES = ("stdlib", "stdlib_code", *_READERS)
"""The names that `load_texts` knows."""
