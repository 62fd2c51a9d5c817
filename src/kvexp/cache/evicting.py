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
from kvexp.cache.dense import DenseLayer, Source
from kvexp.cache.packed_kept import PackedKept
from kvexp.cache.rows import KeptRows, RaggedRows, Rows, join

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
        new = self.q_slots.to(torch.int32)[None, None], self.q_positions.to(torch.int32)[:, None]
        self.slots, self.positions = (
            _cat(old, x) for old, x in zip((self.slots, self.positions), new, strict=True)
        )
        self.next_position = self.q_positions[:, -1] + 1
        self.new_rows = self.q_slots.numel()

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
        self.sources = tuple(source for source in self.sources if not isinstance(source, Stored))
        if self.rows:
            parts.append(self.held())
        if parts:
            self._hold(join(parts))

    def _hold(self, rows: Rows) -> None:
        self.keys, self.values, self.slots, self.positions = (
            rows.keys,
            rows.values,
            rows.slots,
            rows.positions,
        )
        self.valid, self.tracks = rows.valid, dict(rows.tracks)
        self.rows, self._buffers, self.start = rows.keys.shape[2], None, 0

    def keep(self, indices: torch.Tensor, valid: torch.Tensor | None, ragged: bool) -> None:
        """Keep the rows at `indices` [B, H, n], ascending; `valid` [B, H, n] marks those that count.

        Needs `own` before. `ragged` stores heads of different lengths end to end instead of masked.
        """
        self._store(self.held().gather(indices, valid), ragged)

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
        if self.rows:
            sources = (*sources, KeptRows(self.held(), self.seen, self.clean))
        twin = self._successor(sources)
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


class Window:
    """The latest queries of a layer, after rotation: queries [B, Hq, w, D], slots [B, w], real [B, w]."""

    def __init__(self, queries: torch.Tensor, slots: torch.Tensor, real: torch.Tensor) -> None:
        self.queries, self.slots, self.real = queries, slots, real

    def tensors(self) -> list[torch.Tensor]:
        """The tensors held."""
        return [self.queries, self.slots, self.real]

    def last(self, size: int) -> Window:
        """Return the latest `size` of the queries."""
        if size >= self.slots.shape[1]:
            return self
        return Window(self.queries[:, :, -size:], self.slots[:, -size:], self.real[:, -size:])

    def select(self, index: torch.Tensor) -> Window:
        """Return the window of the sequences `index`."""
        return Window(*(x.index_select(0, index.to(x.device)) for x in self.tensors()))

    @staticmethod
    def grown(before: Window | None, call: Call, slots: torch.Tensor, size: int) -> Window:
        """Return the last `size` real queries of each sequence, those of `call` (at `slots` [T]) included."""
        query = call.query
        batch, length = query.shape[0], query.shape[2]
        real = call.padding.at(slots)
        real = torch.ones(batch, length, dtype=torch.bool, device=query.device) if real is None else real
        new = Window(query, slots.to(torch.int32)[None].expand(batch, -1), real)
        if before is not None:
            pairs = zip(before.tensors(), new.tensors(), (2, 1, 1), strict=True)
            new = Window(*(torch.cat([a.expand(batch, *a.shape[1:]), b], dim=d) for a, b, d in pairs))
        if call.padding.pads(0, int(slots[-1]) + 1):  # pads first, real queries in their order behind them
            order = new.real.to(torch.int8).argsort(dim=1, stable=True)
            by_head = order[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
            new = Window(
                new.queries.gather(2, by_head), new.slots.gather(1, order), new.real.gather(1, order)
            )
        # A copy, not a view: the rest of a long prompt's queries must not stay in memory.
        return Window(
            new.queries[:, :, -size:].clone(), new.slots[:, -size:].clone(), new.real[:, -size:].clone()
        )


def _cat(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Join [1 or B, 1 or H, S] along S, widening where one side tells sequences or heads apart."""
    shape = [max(a, b) for a, b in zip(old.shape[:2], new.shape[:2], strict=True)]
    return torch.cat([x.expand(*shape, -1) for x in (old, new)], dim=-1)
