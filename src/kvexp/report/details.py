"""What the page shows of one cell when it is opened: its numbers, its first samples, where it comes from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvexp.report.items import Items, Record
from kvexp.report.stored import parse

SAMPLES = 20
TEXT = 1200  # characters of one text; the file has the rest
ROOM = 16_000  # bytes of one cell's samples: a hundred cells then stay below two megabytes
LINKED = ("record.json", "samples.jsonl", "latency.json", "config.yaml", "memory.json", "log.txt")


def detail(record: Record, items: Items, page: Path) -> dict[str, Any]:
    """Return the plain data of one cell; links are addresses relative to the folder that `page` lies in."""
    samples = items.samples(record)
    return {
        "samples": shortened(samples[:SAMPLES]),
        "total": len(samples),
        "files": _links(record["folder"], page),
        "memory": memory_of(record),
        **{name: record.get(name) for name in ("metrics", "cache", "timing", "identity", "provenance")},
        "fidelity": {k: v for k, v in (record["fidelity"] or {}).items() if not isinstance(v, dict)},
    }


def shortened(samples: Sequence[Mapping[str, Any]], room: int = ROOM) -> list[dict[str, Any]]:
    """Return what was asked, answered, expected and scored, with texts cut so that all of it fits."""
    limit = TEXT
    while True:
        rows = [_sample(sample, limit) for sample in samples]
        if limit <= 40 or len(json.dumps(rows)) <= room:
            return rows
        limit = limit * 3 // 4


def memory_of(record: Record) -> dict[str, Any]:
    """Return what memory.json tells of the calibration, {} where the run had none."""
    try:
        pointer = parse((Path(record["folder"]) / "memory.json").read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(pointer, dict) or not isinstance(pointer.get("manifest"), dict):
        return {}
    manifest = {k: v for k, v in pointer["manifest"].items() if not _long(v)}
    return {"built": pointer.get("built"), **manifest}


def _sample(sample: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Return the fields of one sample that the page shows, texts as text."""
    texts = {name: sample[name] for name in sample if name.startswith(("query", "answer", "expected"))}
    shown: dict[str, Any] = {name: _cut(_text(value), limit) for name, value in texts.items()}
    kept = ("id", "scores", "group", "stop", "new_tokens", "prompt_tokens")
    return {**{name: sample[name] for name in kept if name in sample}, **shown}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " | ".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cut(text: str, limit: int) -> str:
    """Return the head and the tail of a long text."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} … ({len(text) - 2 * half:,} characters) … {text[-half:]}"


def _links(folder: str, page: Path) -> dict[str, str]:
    """Return the address of each file, with `#`, `?`, `%` and `:` of folder names escaped."""
    found = [name for name in LINKED if (Path(folder) / name).exists()]
    start = page.resolve().parent
    paths = {name: os.path.relpath(Path(folder).resolve() / name, start) for name in found}
    return {name: quote(os.fsencode(path)) for name, path in paths.items()}


def _long(value: Any) -> bool:
    return len(json.dumps(value, default=str)) > 600
