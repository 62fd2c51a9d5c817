"""A cache layer whose rows may leave it, head by head, while true positions stay what they are.

Each KV head of each sequence keeps its own rows, in the order of their slots. The layer knows nothing of how
rows are chosen: after each attention it hands itself to its *evictor*, which may call `keep`. Rows that are
finished (an encoded context that several queries fork) are held by a source until somebody evicts from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvexp.attention.function import Call
from kvexp.cache.dense import DenseLayer
from kvexp.cache.packed_kept import PackedKept
from kvexp.cache.room import SLACK, Room, spare
from kvexp.cache.rows import KeptRows, RaggedRows, Rows, join
from kvexp.cache.source import Source
from kvexp.cache.window import Window
from kvexp_kernels.gather_compact import gather_compact

Stored = KeptRows | RaggedRows | PackedKept


class Evictor(Protocol):
    """What decides which rows stay."""

    @property
    def wants_lse(self) -> bool:
        """Whether it reads attention probabilities."""

    @property
    def wants_rows(self) -> bool:
        """Whether it reads all rows at every step, so that a fork owns them from its first token on."""

    def after(self, layer: EvictingLayer, call: Call) -> None:
        """See the layer right after it has attended; may call `layer.keep`."""
        ...


class EvictingLayer(DenseLayer):
    """slots and positions are [1 or B, 1 or H, S]; `valid` [B, H, S] marks rows that count (None: all)."""

    evictor: Evictor

    def __init__(
        self, index: int, sources: Sequence[Source] = (), seen: int = 0, backend: str = "auto"
    ) -> None:
        super().__init__(tuple(sources), seen, None, backend)
        self.index = index
        self.slots = torch.empty(1, 1, 0, dtype=torch.int32)
        self.positions = torch.empty(1, 1, 0, dtype=torch.int32)
        self.valid: torch.Tensor | None = None
        self.tracks: dict[str, torch.Tensor] = {}  # what the evictor remembers of each row, [B, H, S]
        self.remembered: dict[str, torch.Tensor] = {}  # what it remembers of each sequence, [1 or B, ...]
        self.queries: Window | None = None  # the latest queries, where the evictor wants them
        self.lse: torch.Tensor | None = None  # [B, Hq, T] of the latest attention
        self.next_position = torch.zeros(1, dtype=torch.long)  # [1 or B]: where the next token stands

    @property
    def wants_lse(self) -> bool:
        """Whether the evictor reads attention probabilities."""
        return self.evictor.wants_lse

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
            _cat(old, x) for old, x in zip((self._slots, self._positions), new, strict=True)
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

    def attend(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (output [B, Hq, T, Dv], lse or None)."""
        self._note_valid(call)
        output, self.lse = super().attend(call)
        return output, self.lse

    def after(self, call: Call) -> None:
        """Let the evictor act."""
        self.evictor.after(self, call)
        self.lse = None

    def update(self, key_states, value_states, *args, kwargs=None, **more):
        """Append rows; where the evictor reads all rows at every step, take those of sources first."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.evictor.wants_rows and self.sources:
            self.own()
        return super().update(key_states, value_states, *args, kwargs=kwargs, **more)

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

    def own(self) -> None:
        """Take over the rows that sources hold, in front of the layer's own."""
        stored = [source for source in self.sources if isinstance(source, Stored)]
        parts = [source.unpack() for source in stored]
        if not stored:
            return
        self.sources = tuple(source for source in self.sources if not isinstance(source, Stored))
        if self.rows:
            parts.append(self.held())
        self._hold(join(parts))

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

    def keep(self, indices: torch.Tensor, valid: torch.Tensor | None, ragged: bool) -> None:
        """Keep the rows at `indices` [B, H, n], ascending; `valid` [B, H, n] marks those that count.

        Needs `own` before. `ragged` stores heads of different lengths end to end instead of masked.
        """
        if valid is None and not ragged and self._compacts(indices):
            self._compact(indices)
        else:
            self._store(self.held().gather(indices, valid), ragged)

    def _compacts(self, indices: torch.Tensor) -> bool:
        """Whether the rows at `indices` may stay in the room: nobody else reads it, and few leave.

        After a long prompt they move to a buffer of their own size instead, so that the old one is freed.
        """
        if type(self) is not EvictingLayer or self.valid is not None or not self._alone or self._room is None:
            return False
        batch, _, rows = indices.shape
        return len(self.keys) == batch and self._room.keys.shape[2] <= rows + 2 * spare(rows)

    def _compact(self, indices: torch.Tensor) -> None:
        """Keep the rows at `indices` [B, H, n] in place."""
        batch, heads, rows = indices.shape
        shape = batch, heads, self.rows
        self.slots, self.positions = (
            x.expand(shape).gather(2, indices) for x in (self.slots, self.positions)
        )
        self.tracks = {name: self._grown_track(x).gather(2, indices) for name, x in self.tracks.items()}
        self.keys, self.values = gather_compact([self.keys, self.values], indices)
        self.rows, self.start = rows, 0
        assert self._room is not None
        self._room.enter(self, self._at + rows)

    def rewrite(self, keys: torch.Tensor | None = None, values: torch.Tensor | None = None) -> None:
        """Hold other keys or values for the same rows."""
        self.keys = self.keys if keys is None else keys
        self.values = self.values if values is None else values
        self._move_out()

    @property
    def drops(self) -> bool:
        """Whether rows may leave by `drop`: nobody else reads them, and nothing is noted of any."""
        plain = type(self) is EvictingLayer and self.valid is None and not self.tracks
        return plain and self._alone and self._room is not None and not self.sources

    def move_in(self) -> bool:
        """Take over all rows, in a room that nobody else reads, so that they may `drop`; False: they may not.

        Rows of sources and own ones are copied once, where `own` and `keep` copy them several times.
        """
        parts = [source.rows for source in self.sources if isinstance(source, KeptRows)]
        plain = type(self) is EvictingLayer and self.valid is None and not self.tracks
        if not plain or len(parts) < len(self.sources) or any(p.valid is not None or p.tracks for p in parts):
            return False
        slots, positions = self.slots, self.positions
        for part in reversed(parts):
            slots, positions = _cat(part.slots, slots), _cat(part.positions, positions)
        rows, buffers = slots.shape[2], []
        for of_parts in ([*(p.keys for p in parts), self.keys], [*(p.values for p in parts), self.values]):
            batch, heads, _, width = of_parts[-1].shape
            buffers.append(of_parts[-1].new_empty(batch, heads, rows + spare(rows), width))
            at = 0
            for part_rows in of_parts:
                buffers[-1][:, :, at : at + part_rows.shape[2]] = part_rows
                at += part_rows.shape[2]
        self._move_out()
        self._room, self._alone, self.sources = Room(*buffers), True, ()
        shape = *self.keys.shape[:2], rows
        self.slots, self.positions = (x.expand(shape).contiguous() for x in (slots, positions))
        self.rows, self.start = rows, 0
        self._room.enter(self, rows)
        self.keys, self.values = self._room.rows(0, rows)
        return True

    def drop(self, first: int, count: int) -> None:
        """Let the `count` rows behind the first `first` go, at the cost of moving those; see `drops`."""
        assert self._room is not None
        for rows in (self.keys, self.values):
            rows[:, :, count : count + first] = rows[:, :, :first].clone()
        self._leave(first, count)
        self._at, self.rows = self._at + count, self.rows - count
        self.keys, self.values = self._room.rows(self._at, self._at + self.rows)

    def _store(self, rows: Rows, ragged: bool) -> None:
        """Hold these rows in place of the own ones."""
        if ragged:
            self._release(RaggedRows(rows, self.seen, self.clean))
        else:
            self._hold(rows)

    def _release(self, stored: Stored) -> None:
        """Let a source hold what the layer held."""
        self.sources = (*self.sources, stored)
        empty = self.keys.new_empty(*self.keys.shape[:2], 0, self.keys.shape[3])
        none = self.slots.new_empty(1, 1, 0)
        self._hold(Rows(empty, self.values.new_empty(*empty.shape[:3], self.values.shape[3]), none, none))

    def fork(self) -> EvictingLayer:
        """Return a layer that continues from here; what is held so far is shared until one of them evicts."""
        sources: tuple[Source, ...] = self.sources
        self._alone = False
        if self.rows:
            if self._room is None and self.valid is None and not sources:
                own = self.keys, self.values
                self._room = Room.of(own, own, self.rows, self.rows + SLACK)
                self._room.enter(self, self.rows)
                self.keys, self.values = self._room.rows(0, self.rows)
            sources = (*sources, KeptRows(self.held(), self.seen, self.clean))
        twin = self._successor(sources)
        if self.rows and self.valid is None:
            self._lend(twin)
        if self.is_initialized:
            twin.lazy_initialization(self.keys, self.values)
        twin.clean, twin.queries, twin.next_position = self.clean, self.queries, self.next_position
        twin.remembered = dict(self.remembered)
        return twin

    def _successor(self, sources: Sequence[Source]) -> EvictingLayer:
        """Return a layer of the same kind that stands on `sources`."""
        return EvictingLayer(self.index, sources, self.seen, self.backend)

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor that the method holds in this layer, its own notes included."""
        found = [t for source in self.sources for t in source.tensors()]
        if self.is_initialized:
            found += [self.keys, self.values, self.slots, self.positions, *self.tracks.values()]
        found += self.remembered.values()
        if self.valid is not None:
            found.append(self.valid)
        return found if self.queries is None else [*found, *self.queries.tensors()]

    def entries(self) -> int:
        """Rows per KV head of the sequence that holds most (pads do not count)."""
        if not self.rows:
            own = 0
        elif self.valid is None:
            own = self.rows
        else:
            own = int(self.valid.sum(-1).amax())
        return own + sum(source.entries for source in self.sources)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices` of the batch; what is stored once for all of them stays."""
        self.sources = tuple(source.select(indices) for source in self.sources)
        if self.is_initialized and self.keys.shape[0] > 1:
            self._hold(self.held().select(indices))
        if self.queries is not None and self.queries.queries.shape[0] > 1:
            self.queries = self.queries.select(indices)
        for name, values in self.remembered.items():
            if values.shape[0] > 1:
                self.remembered[name] = values.index_select(0, indices.to(values.device))
        if self.next_position.shape[0] > 1:
            self.next_position = self.next_position.index_select(0, indices.to(self.next_position.device))


def _cat(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Join [1 or B, 1 or H, S] along S, widening where one side tells sequences or heads apart."""
    shape = [max(a, b) for a, b in zip(old.shape[:2], new.shape[:2], strict=True)]
    return torch.cat([x.expand(*shape, -1) for x in (old, new)], dim=-1)
