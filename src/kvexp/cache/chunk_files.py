"""Chunks on disk: a safetensors file each, and a manifest beside it that holds its sha256.

A chunk counts once its manifest is there, and the manifest comes last, so that a process killed while it
writes leaves nothing that looks whole. What is known of a chunk (its place, its length) stands in the
safetensors metadata, so that the sha256 covers it as well. A file that is not what was written is removed
with a sentence in the log, and its unit is encoded anew. Several processes may share a folder; one that may
not write there reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from kvexp.cache.chunk_store import Chunk, Codec
from kvexp.files import file_lock, remove_leftovers, write_atomic

log = logging.getLogger(__name__)
BROKEN = (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError, SafetensorError)
Span = tuple[int, int]  # the position of a chunk's first row, and how many rows it has


class ChunkFiles:
    """The chunks in `folder`, at most `capacity` bytes of them; those that were used least recently leave."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.folder, self.capacity, self.damaged = folder, capacity, 0
        folder.mkdir(parents=True, exist_ok=True)
        self.writable = _writable(folder)
        if self.writable:
            self._tidy()
        else:
            log.warning(
                "the chunk store %s cannot be written: it is read, and what is new is not kept", folder
            )
        self._sizes = {key: size for _, size, key in self._entries()}
        self._bytes = sum(self._sizes.values())

    def _tidy(self) -> None:
        """Remove what killed writers left."""
        with file_lock(self.folder / ".lock"):
            remove_leftovers(self.folder)
            for data in self.folder.glob("*.safetensors"):
                if not data.with_suffix(".json").exists():  # its writer was killed before the manifest
                    _remove(data)

    def read(self, key: str, codec: Codec, span: Span | None = None) -> Chunk | None:
        """Return a chunk, or None where there is none, or none that is whole and stands where `span` says."""
        try:
            chunk = self._load(key, codec, span)
        except BROKEN:
            if not self._note(key).exists():
                return None
            # Another process may just have been writing it.
            with file_lock(self.folder / ".lock") if self.writable else contextlib.nullcontext():
                try:
                    chunk = self._load(key, codec, span)
                except BROKEN as error:
                    self._discard(key, error)
                    return None
        self.touch(key)
        return chunk

    def touch(self, key: str) -> None:
        """Make a chunk the one that was used last, where it is still there and may be written.

        The time is given, since that of the kernel goes on in steps in which many chunks are used.
        """
        with contextlib.suppress(OSError):
            now = time.time_ns()
            os.utime(self._note(key), ns=(now, now))

    def _load(self, key: str, codec: Codec, span: Span | None) -> Chunk:
        manifest = json.loads(self._note(key).read_bytes())
        data = self._data(key).read_bytes()
        if hashlib.sha256(data).hexdigest() != manifest["sha256"]:
            raise ValueError("its sha256 is not the one that was written")
        chunk = _unpacked(data, key, codec)
        if span is not None and (chunk.start, chunk.length) != span:
            raise ValueError(
                f"it holds {chunk.length} rows from {chunk.start} on, not {span[1]} from {span[0]}"
            )
        return chunk

    def write(self, key: str, chunk: Chunk) -> None:
        """Write a chunk; older ones leave where the capacity is exceeded. A larger one is not written."""
        if not self.writable:
            return
        data = _packed(key, chunk)
        if len(data) > self.capacity:
            return
        manifest = {"sha256": hashlib.sha256(data).hexdigest()}
        with file_lock(self.folder / ".lock"):
            _remove(self._note(key))
            if self._data(key).is_dir():
                _remove(self._data(key))
            write_atomic(self._data(key), data)
            write_atomic(self._note(key), json.dumps(manifest).encode())
            self.touch(key)
            self._forget(key)  # what it takes the place of
            self._sizes[key] = len(data)
            self._bytes += len(data)
            if self._bytes > self.capacity:
                self._shrink()

    def size(self, chunk: Chunk) -> int:
        """Bytes that a chunk takes on disk."""
        return len(_packed("0" * 32, chunk))

    def _note(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _data(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _forget(self, key: str) -> None:
        self._bytes -= self._sizes.pop(key, 0)

    def _discard(self, key: str, error: Exception) -> None:
        self.damaged += 1
        reason = str(error).split("\n")[0] or type(error).__name__
        log.warning("the stored chunk %s is damaged (%s): its unit is encoded anew", self._data(key), reason)
        if self.writable:
            with contextlib.suppress(OSError):
                for path in (self._note(key), self._data(key)):
                    _remove(path)
            self._forget(key)

    def _entries(self) -> list[tuple[int, int, str]]:
        """Return (time of last use, bytes, key) of every chunk, the least recently used first."""
        found = []
        for note in self.folder.glob("*.json"):
            try:
                size = self._data(note.stem).stat().st_size
                found.append((note.stat().st_mtime_ns, size, note.stem))
            except FileNotFoundError:  # another process removed it
                continue
        return sorted(found)

    def _shrink(self) -> None:
        entries = self._entries()
        self._sizes = {key: size for _, size, key in entries}
        self._bytes = sum(self._sizes.values())
        for _, _, key in entries:
            if self._bytes <= self.capacity:
                break
            _remove(self._note(key))  # first: without it the data is nothing
            _remove(self._data(key))
            self._forget(key)


def _writable(folder: Path) -> bool:
    lock = folder / ".lock"
    return os.access(folder, os.W_OK) and (not lock.exists() or os.access(lock, os.W_OK))


def _remove(path: Path) -> None:
    """Remove a file of the store, or the folder that stands in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _packed(key: str, chunk: Chunk) -> bytes:
    tensors = {
        f"{i}.{name}": t.contiguous().cpu()
        for i, layer in enumerate(chunk.layers)
        for name, t in layer.items()
    }
    facts = {"start": chunk.start, "length": chunk.length, "layers": len(chunk.layers)}
    texts = {"key": key, "codec": chunk.codec.name}
    return save(tensors, texts | {name: str(number) for name, number in facts.items()})


def _unpacked(data: bytes, key: str, codec: Codec) -> Chunk:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    facts = header["__metadata__"]
    if facts["key"] != key:
        raise ValueError(f"it was written as {facts['key']}")
    if facts["codec"] != codec.name:
        raise ValueError(f"it was written as {facts['codec']}")
    layers: list[dict[str, Any]] = [{} for _ in range(int(facts["layers"]))]
    for name, tensor in load(data).items():
        layer, _, part = name.partition(".")
        layers[int(layer)][part] = tensor
    if not all(layers):
        raise ValueError("a layer is missing")
    return Chunk(int(facts["start"]), int(facts["length"]), tuple(layers), codec)
