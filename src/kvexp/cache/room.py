"""Buffers with room behind their rows, which a layer and its forks fill without copying those."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

if TYPE_CHECKING:
    from kvexp.cache.dense import DenseLayer

SLACK = 64  # rows of room that a growing buffer keeps, so that decoding does not copy at every token


def spare(rows: int) -> int:
    """Return the rows of room that a buffer of `rows` gets when it grows."""
    return max(SLACK, rows // 8)


class Room:
    """keys/values [B, H, room, D]. Each layer stands on the first rows, up to its *reach*.

    A layer may write behind its reach where no other layer that is alive reaches further: one fork of a
    context at a time takes the room, and the others keep rows of their own.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values
        self._reach: WeakKeyDictionary[DenseLayer, int] = WeakKeyDictionary()

    @staticmethod
    def of(old: tuple[torch.Tensor, ...], new: tuple[torch.Tensor, ...], rows: int, room: int) -> Room:
        """Return room for `room` rows shaped like `new`, the first `rows` of which are `old`.

        Rows of a context that was encoded once (batch 1) widen to the batch.
        """
        buffers = [x.new_empty(*x.shape[:2], room, x.shape[3]) for x in new]
        if rows:
            for buffer, x in zip(buffers, old, strict=True):
                buffer[:, :, :rows] = x
        return Room(*buffers)

    def enter(self, layer: DenseLayer, reach: int) -> None:
        """Let `layer` stand on the first `reach` rows."""
        self._reach[layer] = reach

    def fits(self, layer: DenseLayer, batch: int, reach: int, end: int) -> bool:
        """Whether `layer`, which stands on `reach` rows, may write up to `end` for `batch` sequences."""
        if self.keys.shape[2] < end or self.keys.shape[0] != batch:
            return False
        return all(far <= reach or other is layer for other, far in self._reach.items())

    def begin_with(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Move rows [B, H, n, D] that stand in the room to its beginning."""
        for buffer, rows in ((self.keys, keys), (self.values, values)):
            buffer[:, :, : rows.shape[2]] = rows.clone()  # the two may overlap

    def rows(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of the rows start, ..., end - 1."""
        return self.keys[:, :, start:end], self.values[:, :, start:end]
