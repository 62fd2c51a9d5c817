"""A reader of W&B's offline files, whose format is private: blocks of 32 KiB with checksummed entries."""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK, HEADER = 32768, 7
WHOLE, LAST = 1, 4


def records(path: Path) -> Iterator[wandb_internal_pb2.Record]:
    """Yield the records of a .wandb file: blocks of 32 KiB, entries with a checksum."""
    data = path.read_bytes()
    ident, magic, _ = struct.unpack("<4sHB", data[:HEADER])
    assert (ident, magic) == (b":W&B", 0xBEE1)
    place, parts = HEADER, b""
    while place < len(data):
        left = BLOCK - place % BLOCK
        if left < HEADER:
            place += left
            continue
        checksum, length, kind = struct.unpack("<IHB", data[place : place + HEADER])
        if kind == 0:
            break
        body = data[place + HEADER : place + HEADER + length]
        assert zlib.crc32(bytes([kind]) + body) == checksum
        place, parts = place + HEADER + length, parts + body
        if kind in (WHOLE, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def finished(folder: Path) -> list[wandb_internal_pb2.Record]:
    """Return the records of the one run below `folder`; wandb writes some only after `finish` returned."""
    (path,) = folder.rglob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            found = list(records(path))
        except (struct.error, AssertionError):  # half of an entry
            found = []
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        time.sleep(0.02)
    raise TimeoutError(path)


def read(folder: Path) -> dict:
    """Return run, config, summary, history, table and exit code of the one offline run below `folder`."""
    found: dict = {"config": {}, "summary": {}, "history": [], "artifacts": [], "preempting": False}
    for record in finished(folder):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found["run"] = record.run
            found["config"].update(
                {item.key: json.loads(item.value_json) for item in record.run.config.update}
            )
        elif kind == "history":
            found["history"].append(values(record.history.item))
        elif kind == "summary":
            found["summary"].update(values(record.summary.update))
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
        elif kind == "preempting":
            found["preempting"] = True
        elif kind == "artifact":
            found["artifacts"].append(record.artifact)
    found["tables"] = [json.loads(file.read_text()) for file in folder.rglob("*.table.json")]
    return found


def values(items: Any) -> dict:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
