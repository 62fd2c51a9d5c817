"""Rows in few bits (`quantise`, `Packed`), and columns of them that grow."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvexp_kernels.quantise import Packed, quantise

__all__ = ["Column", "Packed", "quantise"]

SLACK = 64  # rows of room that a growing buffer keeps, so that decoding does not copy at every token


class Column:
    """Packed rows that grow at the end, in buffers with room.

    What it starts with is never written to, so that columns may start with the same rows. Where groups run
    over rows, those held must be whole groups when more are appended.
    """

    def __init__(self, packed: Packed | None = None) -> None:
        self.packed = packed
        self._growing: list[_Growing] | None = None

    @property
    def rows(self) -> int:
        """Rows held."""
        return 0 if self.packed is None else self.packed.rows

    def append(self, more: Packed) -> None:
        """Put packed rows behind those that are held; of one sequence, these widen to the batch of `more`."""
        if self.packed is None or not self.packed.rows:
            self.packed, self._growing = more, None
            return
        if self._growing is None:
            self._growing = [_Growing(x) for x in self.packed.tensors()]
        pairs = zip(self._growing, more.tensors(), strict=True)
        codes, scale, minimum = (growing.append(x) for growing, x in pairs)
        self.packed = replace(self.packed, codes=codes, scale=scale, minimum=minimum)


class _Growing:
    """A tensor that grows along its second last axis."""

    def __init__(self, start: torch.Tensor) -> None:
        self.held = start
        self.buffer: torch.Tensor | None = None

    def append(self, more: torch.Tensor) -> torch.Tensor:
        """Return everything held, `more` at its end."""
        used, end = self.held.shape[-2], self.held.shape[-2] + more.shape[-2]
        if self.buffer is None or self.buffer.shape[-2] < end:
            room = end + max(SLACK, end // 8)
            self.buffer = more.new_empty(*more.shape[:-2], room, more.shape[-1])
            self.buffer[..., :used, :] = self.held
        self.buffer[..., used:end, :] = more
        self.held = self.buffer[..., :end, :]
        return self.held
