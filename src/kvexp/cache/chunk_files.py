"""Chunks on disk: a safetensors file each, and a manifest beside it that says what it has to be.

A chunk counts once its manifest is there, and the manifest comes last, so that a process killed while it
writes leaves nothing that looks whole. A file whose sha256 is not that of its manifest is removed with a
sentence in the log, and its unit is encoded anew. Several processes may share a folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from kvexp.cache.chunk_store import Chunk, Codec
from kvexp.files import file_lock, remove_leftovers, write_atomic

log = logging.getLogger(__name__)
BROKEN = (OSError, ValueError, KeyError, TypeError, SafetensorError)


class ChunkFiles:
    """The chunks in `folder`, at most `capacity` bytes of them; those that were used least recently leave."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.folder, self.capacity, self.damaged = folder, capacity, 0
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / ".lock"):
            remove_leftovers(folder)
            for data in folder.glob("*.safetensors"):
                if not data.with_suffix(".json").exists():  # its writer was killed before the manifest
                    data.unlink(missing_ok=True)
        self._bytes = sum(size for _, size, _ in self._entries())

    def read(self, key: str, codec: Codec) -> Chunk | None:
        """Return a chunk, or None where there is none, or none that is whole."""
        note = self.folder / f"{key}.json"
        try:
            chunk = self._load(key, codec)
        except BROKEN:
            if not note.exists():
                return None
            with file_lock(self.folder / ".lock"):  # another process may just have been writing it
                try:
                    chunk = self._load(key, codec)
                except BROKEN as error:
                    self._discard(key, error)
                    return None
        os.utime(note)  # the order of use
        return chunk

    def _load(self, key: str, codec: Codec) -> Chunk:
        manifest = json.loads((self.folder / f"{key}.json").read_bytes())
        data = self._data(key).read_bytes()
        if hashlib.sha256(data).hexdigest() != manifest["sha256"]:
            raise ValueError("its sha256 is not the one that was written")
        return _unpacked(load(data), manifest, codec)

    def write(self, key: str, chunk: Chunk) -> None:
        """Write a chunk; older ones leave where the capacity is exceeded. A larger one is not written."""
        tensors = {
            f"{i}.{name}": t.contiguous() for i, layer in enumerate(chunk.layers) for name, t in layer.items()
        }
        data = save({name: t.cpu() for name, t in tensors.items()})
        if len(data) > self.capacity:
            return
        facts = {"start": chunk.start, "length": chunk.length, "layers": len(chunk.layers)}
        manifest = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "codec": chunk.codec.name}
        with file_lock(self.folder / ".lock"):
            (self.folder / f"{key}.json").unlink(missing_ok=True)
            write_atomic(self._data(key), data)
            write_atomic(self.folder / f"{key}.json", json.dumps(manifest | facts).encode())
            self._bytes += len(data)
            if self._bytes > self.capacity:
                self._shrink()

    def _data(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _discard(self, key: str, error: Exception) -> None:
        self.damaged += 1
        reason = str(error).split("\n")[0] or type(error).__name__
        log.warning("the stored chunk %s is damaged (%s): its unit is encoded anew", self._data(key), reason)
        for path in (self.folder / f"{key}.json", self._data(key)):
            path.unlink(missing_ok=True)

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
        self._bytes = sum(size for _, size, _ in entries)
        for _, size, key in entries:
            if self._bytes <= self.capacity:
                break
            (self.folder / f"{key}.json").unlink(missing_ok=True)  # first: without it the data is nothing
            self._data(key).unlink(missing_ok=True)
            self._bytes -= size


def _unpacked(tensors: dict[str, Any], manifest: dict[str, Any], codec: Codec) -> Chunk:
    if manifest["codec"] != codec.name:
        raise ValueError(f"it was written as {manifest['codec']}")
    layers: list[dict[str, Any]] = [{} for _ in range(manifest["layers"])]
    for name, tensor in tensors.items():
        layer, _, part = name.partition(".")
        layers[int(layer)][part] = tensor
    if not all(layers):
        raise ValueError("a layer is missing")
    return Chunk(manifest["start"], manifest["length"], tuple(layers), codec)
