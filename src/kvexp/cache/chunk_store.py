"""A store of keys and values of units of text (a memory note, a passage, a block of a prompt).

A unit is encoded once behind a certain prefix, and its rows are used again wherever its text stands. What is
stored depends on the ids of the prefix and of the unit, on the model's weights and dtype, and on the codec,
and all of them are in the key: a unit behind the system prompt, alone (behind nothing) and in some earlier
context are three entries. Keys are stored as the model rotated them, with the position of their first row.

Entries are kept in memory, the least recently used leave when the capacity is exceeded, or on disk as well
(`kvexp.cache.chunk_files`), from where another process goes on.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kvexp import checksum
from kvexp.errors import UserError

if TYPE_CHECKING:
    from kvexp.cache.chunk_files import ChunkFiles

Parts = Mapping[str, torch.Tensor]  # what a codec makes of one layer's rows
FORMAT = 2


class Codec(Protocol):
    """How the rows of a layer are stored; keys [H, n, D] and values [H, n, Dv] in the model's dtype."""

    name: str  # with everything that changes what is stored: "kivi-2bit-g32"

    def encode(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Parts:
        """Return the tensors that are stored, by name."""
        ...

    def decode(self, layer: int, parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values again, in their dtype and shape."""
        ...


class Exact:
    """The codec that changes nothing."""

    name = "exact"

    def encode(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Parts:
        """Return copies that stand alone in memory."""
        return {"keys": keys.clone(), "values": values.clone()}

    def decode(self, layer: int, parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what was stored."""
        return parts["keys"], parts["values"]


@dataclass(frozen=True)
class Chunk:
    """The stored rows of one unit: `layers[l]` holds the parts of layer l; its first row is at `start`."""

    start: int
    length: int
    layers: tuple[Parts, ...]
    codec: Codec

    @classmethod
    def of(cls, start: int, rows: Sequence[tuple[torch.Tensor, torch.Tensor]], codec: Codec) -> Chunk:
        """Return a chunk of each layer's keys and values [H, n, D]."""
        layers = tuple(codec.encode(i, keys, values) for i, (keys, values) in enumerate(rows))
        return cls(start, rows[0][0].shape[-2], layers, codec)

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [H, n, D] of a layer."""
        return self.codec.decode(layer, self.layers[layer])

    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(map(self.layer_bytes, range(len(self.layers))))

    def layer_bytes(self, layer: int) -> int:
        """Bytes of the parts of a layer, as they are stored."""
        return sum(t.numel() * t.element_size() for t in self.layers[layer].values())


class ChunkStore:
    """Chunks of one model, at most `capacity` bytes of them in memory, and as many on disk in `folder`.

    Attributes:
        counts: hits, misses, evicted (entries that left memory), damaged (files that had to be rebuilt).
        manifest: facts for a record (none).
    """

    def __init__(
        self,
        model: Any,
        capacity: int,
        folder: Path | None = None,
        codec: Codec | None = None,
        sha256: str | None = None,
    ) -> None:
        """Open a store for `model`; `sha256` names its weights (computed where files need it)."""
        if capacity < 1:
            raise UserError(f"a chunk store of {capacity} bytes holds nothing: raise method.store_mb")
        self._model = weakref.ref(model)
        self.capacity, self.codec = capacity, codec or Exact()
        self.counts = {"hits": 0, "misses": 0, "evicted": 0, "damaged": 0}
        self.manifest: dict[str, Any] = {}
        self._held: OrderedDict[str, Chunk] = OrderedDict()
        self._bytes = 0
        self.fingerprint = ""
        self.files: ChunkFiles | None = None
        if folder is not None:
            from kvexp.cache.chunk_files import ChunkFiles

            self.fingerprint = fingerprint(model, sha256)
            self.files = ChunkFiles(folder / f"chunks-{self.fingerprint}", capacity)

    def check(self, model: Any) -> None:
        """Raise UserError for another model than the store was opened for."""
        if self._model() is not model:
            raise UserError(
                "this chunk store was opened for another model: open one with method.opened(model)"
            )

    def codec_for(self, exact: bool) -> Codec:
        """Return the codec of an entry; a shared prefix is always stored exactly."""
        return Exact() if exact else self.codec

    def key(self, prefix: Sequence[int], unit: Sequence[int], exact: bool = False) -> str:
        """Return 32 hex digits that name a unit behind a prefix under this store's model and codec."""
        codec = self.codec_for(exact).name
        text = f"{FORMAT} {self.fingerprint} {codec} {_written(prefix)} | {_written(unit)}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def get(self, prefix: Sequence[int], unit: Sequence[int], exact: bool = False) -> Chunk | None:
        """Return the chunk of `unit` (ids) behind `prefix` (ids), or None: it has to be encoded."""
        key = self.key(prefix, unit, exact)
        found = self._held.get(key)
        if found is not None:
            self._touch(key)
        elif self.files is not None:
            found = self.files.read(key, self.codec_for(exact), (len(prefix), len(unit)))
            self.counts["damaged"] = self.files.damaged
            if found is not None:
                self._hold(key, found)
        self.counts["misses" if found is None else "hits"] += 1
        return found

    def put(self, prefix: Sequence[int], unit: Sequence[int], chunk: Chunk, exact: bool = False) -> None:
        """Keep a chunk; those that were used least recently leave where the capacity is exceeded.

        Its first row is at the position len(`prefix`). One that is larger than the capacity is not kept.
        """
        key = self.key(prefix, unit, exact)
        self._hold(key, chunk)
        if self.files is not None:
            self.files.write(key, chunk)

    def touch(self, prefix: Sequence[int], unit: Sequence[int]) -> None:
        """Make a chunk the one that was used last, in memory and on disk; no look-up is counted."""
        self._touch(self.key(prefix, unit))

    def _touch(self, key: str) -> None:
        if key in self._held:
            self._held.move_to_end(key)
        if self.files is not None:
            self.files.touch(key)

    def size(self, chunk: Chunk) -> int:
        """Bytes of the capacity that a chunk takes, in memory or on disk, whichever are more."""
        return chunk.nbytes() if self.files is None else max(chunk.nbytes(), self.files.size(chunk))

    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._held)

    def _hold(self, key: str, chunk: Chunk) -> None:
        size = chunk.nbytes()
        old = self._held.pop(key, None)
        self._bytes -= old.nbytes() if old is not None else 0
        if size > self.capacity:
            return
        self._held[key] = chunk
        self._bytes += size
        while self._bytes > self.capacity:
            _, gone = self._held.popitem(last=False)
            self._bytes -= gone.nbytes()
            self.counts["evicted"] += 1


def fingerprint(model: Any, sha256: str | None = None) -> str:
    """Return 16 hex digits over a model's weights, dtype and configuration of positions."""
    config = model.config.get_text_config()
    weights = sha256 or checksum.of_tensors(model.state_dict(), config.model_type)
    rope = sorted((getattr(config, "rope_parameters", None) or {}).items(), key=str)
    facts = f"{FORMAT} {weights} {model.dtype} {config.model_type} {config.num_hidden_layers} {rope}"
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def _written(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))
