"""The keys and values of a batch of contexts, put together from stored chunks, a layer at a time.

Each layer is a pair (the part that turns, the other), [B, H, C, D] in the model's dtype: keys and values, but
in MLA the rotated key and the latent (`Rotary.ordered`). A layer is built when it is first asked for, then
repaired in place; its buffers are those of the finished cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvexp.attention.devices import compute_device
from kvexp.attention.families import layer_windows
from kvexp.attention.options import options_of
from kvexp.attention.rerotate import Angles, Pair, Rotary
from kvexp.cache.chunk_store import Chunk
from kvexp.cache.dense import DenseLayer
from kvexp.methods.reuse.geometry import Geometry


@dataclass(frozen=True)
class Piece:
    """A stored chunk, and where it is placed: from column `start` of context `sequence` on."""

    chunk: Chunk
    sequence: int
    start: int


class Sheet:
    """All layers of a batch; `moved_bytes` counts what is placed, as it is stored."""

    def __init__(self, model: Any, geometry: Geometry, pieces: Sequence[Piece]) -> None:
        self.model, self.geometry, self.pieces = model, geometry, list(pieces)
        self.rotary = Rotary(model)
        self.moved_bytes = 0
        self._layers: dict[int, Pair] = {}
        self._shifts: dict[str, Angles | None] = {}
        self._angles: dict[str, Angles | None] = {}

    def layer(self, index: int, like: Pair | None = None) -> Pair:
        """Return a layer to read and to repair; `like` gives shapes where no chunk does."""
        if index not in self._layers:
            self._layers[index] = self._assembled(index) if self.pieces else self._blank(like)
        return self._layers[index]

    def _blank(self, like: Pair | None) -> Pair:
        assert like is not None  # rows are computed before they are read
        shape = self.geometry.batch, like[0].shape[1], self.geometry.ids.shape[1]
        turning, other = (x.new_zeros(*shape, x.shape[-1]) for x in like)
        return turning, other

    def _assembled(self, index: int) -> Pair:
        placed: Pair | None = None
        device = compute_device(self.model.base_model.layers[index])
        for piece in self.pieces:
            rows = [x.to(device) for x in self.rotary.ordered(*piece.chunk.rows(index))]  # [H, n, D]
            if placed is None:
                placed = self._blank((rows[0][None], rows[1][None]))
            for buffer, x in zip(placed, rows, strict=True):
                buffer[piece.sequence, :, piece.start : piece.start + piece.chunk.length] = x
            self.moved_bytes += piece.chunk.layer_bytes(index)
        assert placed is not None
        shift, (turning, other) = self._shift(index), placed
        if shift is not None:
            turning = shift.turn(turning).to(turning.dtype)
        return turning, other

    def _shift(self, index: int) -> Angles | None:
        """The rotation of each column from where its row was stored to where it stands, [B, 1, C, F]."""
        kind = self.rotary.kind(index)
        if kind is None:
            return None
        if kind not in self._shifts:
            shift = self.rotary.shift(index, self._stored_at(), self.geometry.positions)
            self._shifts[kind] = None if shift is None else shift.unsqueeze(1)
        return self._shifts[kind]

    def _stored_at(self) -> torch.Tensor:
        """The position at which each column's row was stored, [B, C]; its own where nothing is placed."""
        old = self.geometry.positions.clone()
        for piece in self.pieces:
            rows = torch.arange(piece.chunk.length, device=old.device)
            old[piece.sequence, piece.start : piece.start + piece.chunk.length] = rows + piece.chunk.start
        return old

    def angles(self, index: int) -> Angles | None:
        """Return the rotation at every column, [B, C, F]; None where the layer does not rotate."""
        kind = self.rotary.kind(index)
        if kind is None:
            return None
        if kind not in self._angles:
            self._angles[kind] = self.rotary.angles(index, self.geometry.positions)
        return self._angles[kind]

    def dense_layers(self) -> list[DenseLayer]:
        """Return the layers of a cache that holds the contexts' rows as they are now."""
        config = self.model.config.get_text_config()
        geometry, backend = self.geometry, options_of(self.model).backend
        clean = 0 if geometry.padded else geometry.width
        positions = geometry.positions[:, : geometry.width]
        layers = []
        for index, window in enumerate(layer_windows(config)):
            keys, values = self.rotary.ordered(*(x[:, :, : geometry.width] for x in self.layer(index)))
            layers.append(filled(keys, values, positions, window, backend, clean))
        return layers


def filled(
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    window: int | None,
    backend: str,
    clean: int,
    kind: type[DenseLayer] = DenseLayer,
) -> DenseLayer:
    """Return a cache layer that holds rows [B, H, S, D] of the S tokens seen, at positions [1 or B, S].

    A layer with a window holds those that a later query can see. `clean`: see DenseLayer.
    """
    seen = keys.shape[2]
    first = 0 if window is None or kind is not DenseLayer else max(0, seen - window + 1)
    layer = kind(seen=seen, window=window, backend=backend)
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys[:, :, first:], values[:, :, first:]
    layer.slots = torch.arange(first, seen, device=keys.device)
    layer.positions = positions[:, first:].to(keys.device)
    layer.rows, layer.start, layer.clean = seen - first, first, clean
    return layer


class RecordingLayer(DenseLayer):
    """A layer that keeps every row, also those that have left its window."""

    def after(self, call: Any) -> None:
        """Let nothing leave."""
