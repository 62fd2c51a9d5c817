"""A cache layer whose rows may leave it, head by head, while true positions stay what they are.

The layer knows nothing of how rows are chosen: after each attention it hands itself to its *evictor*, which
may call `keep`. Rows that are finished (an encoded context that several queries fork) are held by a source
until somebody evicts from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvexp.attention.function import Call
from kvexp.cache.headwise import HeadwiseLayer, along_rows
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


class EvictingLayer(HeadwiseLayer):
    """Lets its evictor act after each attention; `remembered` and `tracks` are what that notes."""

    evictor: Evictor

    def __init__(
        self, index: int, sources: Sequence[Source] = (), seen: int = 0, backend: str = "auto"
    ) -> None:
        super().__init__(tuple(sources), seen, backend)
        self.index = index
        self.remembered: dict[str, torch.Tensor] = {}  # what it remembers of each sequence, [1 or B, ...]
        self.queries: Window | None = None  # the latest queries, where the evictor wants them
        self.lse: torch.Tensor | None = None  # [B, Hq, T] of the latest attention

    @property
    def wants_lse(self) -> bool:
        """Whether the evictor reads attention probabilities."""
        return self.evictor.wants_lse

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
            slots, positions = along_rows(part.slots, slots), along_rows(part.positions, positions)
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
