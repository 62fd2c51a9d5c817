from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load, save

import helpers
from chunks import PREFIX, UNIT, chunk, same
from kvexp.cache import chunk_files
from kvexp.cache.chunk_files import ChunkFiles
from kvexp.cache.chunk_store import Chunk, ChunkStore, Exact


def opened(folder: Path) -> ChunkStore:
    return ChunkStore(helpers.model("llama"), 10**6, folder, sha256="ab")


def files(folder: Path) -> tuple[Path, Path]:
    [data] = folder.rglob("*.safetensors")
    return data, data.with_suffix(".json")


def flip(data: Path, at: int) -> None:
    content = bytearray(data.read_bytes())
    content[at] ^= 1
    data.write_bytes(content)


def fact(data: Path, name: str) -> None:
    """Change a digit of a fact in the metadata, which stays whole safetensors."""
    at = data.read_bytes().index(f'"{name}":"'.encode()) + len(name) + 4
    flip(data, at)
    load(data.read_bytes())


def folder_of(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


DAMAGE = {
    "flipped bit": lambda data, note: flip(data, -1),
    "cut": lambda data, note: data.write_bytes(data.read_bytes()[: data.stat().st_size // 2]),
    "empty": lambda data, note: data.write_bytes(b""),
    "gone": lambda data, note: data.unlink(),
    "folder": lambda data, note: folder_of(data),
    "start": lambda data, note: fact(data, "start"),
    "length": lambda data, note: fact(data, "length"),
    "layers": lambda data, note: fact(data, "layers"),
    "codec": lambda data, note: fact(data, "codec"),
    "note cut": lambda data, note: note.write_bytes(note.read_bytes()[:20]),
    "note of no text": lambda data, note: note.write_bytes(b"\xff\xfe"),
    "note without a sum": lambda data, note: note.write_text("{}"),
    "note of another type": lambda data, note: note.write_text("[1]"),
    "sum of another type": lambda data, note: note.write_text('{"sha256": [1]}'),
    "note too deep": lambda data, note: note.write_text("[" * 10**5),
    "note a folder": lambda data, note: folder_of(note),
}


def check_rebuilt(folder: Path, caplog: pytest.LogCaptureFixture, reason: str = "") -> None:
    store = opened(folder)
    with caplog.at_level(logging.WARNING):
        assert store.get(PREFIX, UNIT) is None
    assert f"is damaged ({reason}" in caplog.text and "its unit is encoded anew" in caplog.text
    assert store.counts["damaged"] == 1 and store.counts["misses"] == 1
    assert not [*folder.rglob("*.json")] and not [*folder.rglob("*.safetensors")]
    store.put(PREFIX, UNIT, chunk())
    again = opened(folder)
    assert same(again.get(PREFIX, UNIT), chunk()) and again.counts["damaged"] == 0


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_told_and_rebuilt(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    opened(tmp_path).put(PREFIX, UNIT, chunk())
    DAMAGE[kind](*files(tmp_path))
    check_rebuilt(tmp_path, caplog)


FACTS = {
    "start": ("3", "it holds 4 rows from 3 on, not 4 from 2"),
    "length": ("5", "it holds 5 rows from 2 on, not 4 from 2"),
    "layers": ("1", "list index out of range"),
    "codec": ("other", "it was written as other"),
    "key": ("0", "it was written as 0"),
}


@pytest.mark.parametrize("name", FACTS)
def test_facts_that_do_not_fit_are_damage_whatever_the_sum_says(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    opened(tmp_path).put(PREFIX, UNIT, chunk())
    data, note = files(tmp_path)
    content = data.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    changed = save(load(content), {**header["__metadata__"], name: FACTS[name][0]})
    data.write_bytes(changed)
    note.write_text(json.dumps({"sha256": hashlib.sha256(changed).hexdigest()}))
    check_rebuilt(tmp_path, caplog, FACTS[name][1])


def test_a_folder_where_data_without_a_manifest_would_be_is_removed(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors" / "inside").mkdir(parents=True)
    store = ChunkFiles(tmp_path, 10**6)
    assert {path.name for path in tmp_path.iterdir()} == {".lock"}
    (tmp_path / "a.safetensors" / "inside").mkdir(parents=True)
    assert store.read("a", Exact()) is None and store.damaged == 0
    store.write("a", chunk())
    assert same(store.read("a", Exact()), chunk())


def test_a_chunk_that_another_process_removes_just_now_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ChunkFiles(tmp_path, 10**6)
    store.write("a", chunk())
    loaded = ChunkFiles._load

    def removed(self: ChunkFiles, *args: Any) -> Chunk:
        found = loaded(self, *args)
        for path in tmp_path.glob("a.*"):
            path.unlink()
        return found

    monkeypatch.setattr(ChunkFiles, "_load", removed)
    assert same(store.read("a", Exact()), chunk())
    assert not (tmp_path / "a.json").exists() and store.damaged == 0


def test_a_store_that_cannot_be_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = opened(tmp_path)
    mine.put(PREFIX, UNIT, chunk())
    mine.put((), UNIT, chunk(1, start=0))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}

    def refused(*args: Any, **named: Any) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    for name in ("write_atomic", "file_lock", "remove_leftovers", "_remove"):
        monkeypatch.setattr(chunk_files, name, refused)
    monkeypatch.setattr(os, "utime", refused)
    with caplog.at_level(logging.WARNING):
        theirs = opened(tmp_path)
    assert "cannot be written" in caplog.text
    assert same(theirs.get(PREFIX, UNIT), chunk())
    theirs.put((1,), UNIT, chunk(2, start=1))
    assert same(theirs.get((1,), UNIT), chunk(2, start=1))  # from memory
    [damaged] = [path for path in before if path.stem == mine.key((), UNIT) and path.suffix == ".json"]
    damaged.write_text("{}")
    assert theirs.get((), UNIT) is None and theirs.counts["damaged"] == 1
    assert damaged.read_text() == "{}"
    assert {path for path in tmp_path.rglob("*.*") if path.is_file()} == set(before)


def test_a_chunk_that_is_written_again_counts_once(tmp_path: Path) -> None:
    size = ChunkFiles(tmp_path, 10**6).size(chunk())
    store = ChunkFiles(tmp_path, 3 * size)
    for name in ("a", "b", "c"):
        for seed in range(4):
            store.write(name, chunk(seed))
    held = [*tmp_path.glob("*.safetensors")]
    assert {path.stem for path in held} == {"a", "b", "c"}
    assert store._bytes == sum(path.stat().st_size for path in held)
    (tmp_path / "b.json").write_text("{}")
    assert store.read("b", Exact()) is None
    assert store._bytes == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))


def test_on_disk_the_least_recently_used_leave_too(tmp_path: Path) -> None:
    store = ChunkFiles(tmp_path, 10**6)
    for number, name in enumerate("abc"):
        store.write(name, chunk(number))
    size = (tmp_path / "a.safetensors").stat().st_size
    small = ChunkFiles(tmp_path, 3 * size)
    assert small.read("a", Exact()) is not None  # b is now the oldest
    small.write("d", chunk(4))
    assert {path.stem for path in tmp_path.glob("*.safetensors")} == {"a", "c", "d"}
    assert {path.stem for path in tmp_path.glob("*.json")} == {"a", "c", "d"}


def test_a_file_that_is_being_written_is_read_once_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that meets new data beside an old manifest looks again behind the writer's lock."""
    store = ChunkFiles(tmp_path, 10**6)
    store.write("a", chunk(1))
    old = (tmp_path / "a.json").read_bytes()
    store.write("a", chunk(2))
    new = (tmp_path / "a.json").read_bytes()
    (tmp_path / "a.json").write_bytes(old)

    lock = chunk_files.file_lock

    def finished(path: Path) -> Any:
        (tmp_path / "a.json").write_bytes(new)
        return lock(path)

    monkeypatch.setattr(chunk_files, "file_lock", finished)
    assert same(store.read("a", Exact()), chunk(2)) and store.damaged == 0
