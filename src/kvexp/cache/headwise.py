"""A cache layer whose KV heads hold rows of their own, each in the order of its slots."""

from __future__ import annotations

import torch

from kvexp.attention.function import Call
from kvexp.cache.dense import DenseLayer
from kvexp.cache.rows import Rows
from kvexp.cache.source import Source


class HeadwiseLayer(DenseLayer):
    """slots and positions are [1 or B, 1 or H, S]; `valid` [B, H, S] marks rows that count (None: all)."""

    def __init__(self, sources: tuple[Source, ...] = (), seen: int = 0, backend: str = "auto") -> None:
        super().__init__(sources, seen, None, backend)
        self.slots = torch.empty(1, 1, 0, dtype=torch.int32)
        self.positions = torch.empty(1, 1, 0, dtype=torch.int32)
        self.valid: torch.Tensor | None = None
        self.tracks: dict[str, torch.Tensor] = {}  # what is remembered of each row, [B, H, S]
        self.next_position = torch.zeros(1, dtype=torch.long)  # [1 or B]: where the next token stands

    @property
    def _clean_from(self) -> int:
        return 0  # rows of sources may become this layer's own

    def _place(self) -> None:
        super()._place()
        self.next_position = self.q_positions[:, -1] + 1
        self.new_rows = len(self.new)

    def _join(self, slots: torch.Tensor, positions: torch.Tensor) -> None:
        new = slots.to(torch.int32)[None, None], positions.to(torch.int32)[:, None]
        self._slots, self._positions = (
            along_rows(old, x) for old, x in zip((self._slots, self._positions), new, strict=True)
        )

    def _note_valid(self, call: Call) -> None:
        """Mark the new rows that are pads; known only when attention is called with the padding."""
        padded = call.padding.pads(self.seen - self.new_rows, self.seen) > 0
        if not padded and self.valid is None:
            return
        batch, heads = self.keys.shape[:2]
        old = self.valid
        if old is None:
            old = self.slots.new_ones(batch, heads, self.rows - self.new_rows, dtype=torch.bool)
        real = call.padding.at(self.q_slots) if padded else None
        new = old.new_ones(batch, heads, self.new_rows)
        if real is not None:
            new = real[:, None].expand(batch, heads, -1)
        self.valid = torch.cat([old.expand(batch, -1, -1), new], dim=-1)

    def visible(self, call: Call) -> torch.Tensor | None:
        """Return which own rows each query may see, bool [B or 1, 1 or H, T, S]; None when all are."""
        if self.new_rows == 1 and self.valid is None:
            return None
        slots, ours = self.slots[:, :, None, :], self.q_slots[:, None]
        allowed = slots <= ours
        if self.valid is not None:
            # A padded query sees itself: a row without any key would spread NaN to later layers.
            allowed = (allowed & self.valid[:, :, None, :]) | (slots == ours)
        return allowed

    def held(self) -> Rows:
        """Return the layer's own rows as a rectangle of full shape."""
        shape = self.keys.shape[:3]
        slots, positions = (x.expand(shape) for x in (self.slots, self.positions))
        tracks = {name: self._grown_track(track) for name, track in self.tracks.items()}
        return Rows(self.keys, self.values, slots, positions, self.valid, tracks)

    def _grown_track(self, track: torch.Tensor) -> torch.Tensor:
        """Return a track with zeros for the rows that came since."""
        batch, heads, rows = self.keys.shape[:3]
        if track.shape[2] == rows and track.shape[0] == batch:
            return track
        grown = track.new_zeros(batch, heads, rows)
        grown[:, :, : track.shape[2]] = track
        return grown

    def _hold(self, rows: Rows) -> None:
        self.keys, self.values, self.slots, self.positions = (
            rows.keys,
            rows.values,
            rows.slots,
            rows.positions,
        )
        self.valid, self.tracks = rows.valid, dict(rows.tracks)
        self.rows, self.start = rows.keys.shape[2], 0
        self._move_out()


def along_rows(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Join [1 or B, 1 or H, S] along S, widening where one side tells sequences or heads apart."""
    shape = [max(a, b) for a, b in zip(old.shape[:2], new.shape[:2], strict=True)]
    return torch.cat([x.expand(*shape, -1) for x in (old, new)], dim=-1)
