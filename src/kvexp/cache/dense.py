"""A cache layer that keeps every row it is given, and may stand on states that were computed before.

A layer's own rows are `keys`/`values` [B, H, S, D]. What came before them can be held by *sources*: shared
rows of an encoded context (`SharedRows`), or a memory that is looked up (`kvexp.cache.virtual`). A source
gives an attention state (a, lse) for each query; the layer merges it with its local attention.
"""

from __future__ import annotations

from typing import Any

import torch

from kvexp.attention.function import Call
from kvexp.attention.local import attend, attend_without_lse
from kvexp.cache.placed import PlacedLayer
from kvexp.cache.room import Room, spare
from kvexp.cache.shared import SharedRows
from kvexp.cache.source import Observer, Source, at_once
from kvexp_kernels.merge_states import merge_states


class DenseLayer(PlacedLayer):
    """Keeps all rows; with sources it merges their states with attention over its own rows."""

    observer: Observer | None = None  # sees the states of all sources and of the own rows before the merge

    def __init__(
        self,
        sources: tuple[Source, ...] = (),
        seen: int = 0,
        window: int | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(seen)
        self.sources, self.window, self.backend = sources, window, backend
        self.start = 0  # no own row has a lower slot; known without asking the device
        self.pending = False  # rows were appended, and our attention function has not been called since
        self.clean = 0  # the own rows at lower slots were real tokens in every sequence
        self._room: Room | None = None  # where the own rows stand, if there may be more
        self._at = 0  # rows of the room before the own ones
        self._base = 0  # how many of them, the latest, are those of all sources; 0: those stand elsewhere
        self._alone = False  # nobody else reads the room, and it was made to be filled again and again

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        kwargs: dict[str, Any] | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, H, T, D] rows and hand this layer to the attention function; return all own rows."""
        if kwargs is None:
            raise RuntimeError("this model does not pass its keywords to the cache: it is not supported")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = key_states.shape[-2]
        self.new = range(self.seen, self.seen + length)  # the slots of the new rows
        positions = kwargs.get("position_ids")
        self.q_positions = self.q_slots[None] if positions is None else positions.to(self.device)
        self._append(key_states, value_states)
        self._place()
        self.seen += length
        kwargs["kvexp"] = self
        self.pending = True
        return self.keys, self.values

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Write new rows behind the old ones, in a buffer with room."""
        if not self.rows:
            self.start = self.seen
        batch, end = key_states.shape[0], self.rows + key_states.shape[-2]
        if self._room is None or not self._room.fits(self, batch, self._at + self.rows, self._at + end):
            if self._alone and self._room is not None and self._room.fits(self, batch, self.rows, end):
                self._room.begin_with(self.keys, self.values)
            else:
                room = end if self.rows == 0 else end + spare(end)
                self._move_out()
                self._room = Room.of((self.keys, self.values), (key_states, value_states), self.rows, room)
                self._alone = self.rows > 0
            self._at = self._base = 0
        written = self._room.rows(self._at + self.rows, self._at + end)
        for rows, new in zip(written, (key_states, value_states), strict=True):
            rows.copy_(new)
        self._room.enter(self, self._at + end)
        self.keys, self.values = self._room.rows(self._at, self._at + end)
        self.rows = end

    def _move_out(self) -> None:
        """The own rows stand in no room any more."""
        self._room, self._at, self._base, self._alone = None, 0, 0, False

    def visible(self, call: Call) -> torch.Tensor | None:
        """Return which rows each query may see, bool [B or 1, 1, T, S]; None when all rows are visible."""
        window = self._window(call)
        real = call.padding.at(self.slots) if call.padding.pads(self.start, self.seen) else None
        if len(self.new) == 1 and real is None and window is None:
            return None
        q_slots = self.q_slots
        allowed = (self.slots[None, :] <= q_slots[:, None])[None]  # [1, T, S]
        if window is not None:  # distances are rotary ones: pads between context and query do not widen them
            distance = self.q_positions[:, :, None] - self.positions[:, None, :]
            allowed = allowed & (distance < window)
        if real is not None:
            allowed = allowed & real[:, None, :]
            # A padded query sees itself: a row without any key would spread NaN to later layers.
            allowed = allowed | (self.slots[None, None, :] == q_slots[None, :, None])
        return allowed[:, None]

    @property
    def wants_lse(self) -> bool:
        """Whether something reads the log-sum-exp, though nothing may have to be merged."""
        return False

    @property
    def _clean_from(self) -> int:
        return self.start

    def _window(self, call: Call) -> int | None:
        return call.window if call.window is not None else self.window

    def _is_triangle(self, call: Call) -> bool:
        """Whether query t sees exactly the rows 0, ..., t, so that no mask has to be built."""
        length = call.query.shape[-2]
        fits = (self._window(call) or length) >= length
        return length == self.rows > 1 and fits and not call.padding.pads(self.start, self.seen)

    def _stands_together(self, call: Call) -> bool:
        """Whether one token attends to the rows of sources and its own as one, since they stand together."""
        if not self._base or len(self.new) > 1 or self.observer is not None or self.wants_lse:
            return False
        if self._window(call) is not None or hasattr(call.module, "expand_kv"):
            return False
        return not call.padding.pads(0, self.seen)

    def attend(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (output [B, Hq, T, Dv], lse or None) over the sources and the layer's own rows."""
        self.pending = False
        call.padding.refuse_inside(self.start, self.clean)
        if not call.padding.pads(self._clean_from, self.seen):
            self.clean = self.seen
        if self._stands_together(call):
            assert self._room is not None
            rows = self._room.rows(self._at - self._base, self._at + self.rows)
            together = (call.query, *rows, call.scale, None, False)
            return (
                attend(*together, self.backend) if call.needs_lse else (attend_without_lse(*together), None)
            )
        causal = self._is_triangle(call)
        visible = None if causal else self.visible(call)
        if not (self.sources or call.needs_lse or self.wants_lse):
            return attend_without_lse(call.query, call.key, call.value, call.scale, visible, causal), None
        if visible is None and (whole := at_once(call, self)) is not None:
            return whole
        local = attend(call.query, call.key, call.value, call.scale, visible, causal, self.backend)
        before = [source.state(call, self) for source in self.sources]
        if self.observer is not None:
            self.observer(self, call, before, local)
        output, lse = local
        for a, s in before:
            output, lse = merge_states(a.to(output.dtype), s, output, lse)
        return output, lse

    def after(self, call: Call) -> None:
        """Drop the rows of a sliding layer that no later query can see."""
        window = self._window(call)
        if window is None or self.rows < 2 * window:
            return
        farthest = self.q_positions[:, -1:] + 1 - window  # a later query sees positions above this
        needed = (self.positions > farthest).any(0)
        needed[self.rows - window + 1 :] = True
        found = needed.nonzero()
        first = int(found[0]) if len(found) else self.rows
        if first:
            self.compact(torch.arange(first, self.rows, device=self.device))

    def compact(self, keep: torch.Tensor) -> None:
        """Keep only the rows `keep` [n], in position order; lengths, slots and positions stay true."""
        keep = keep.sort().values
        self.keys, self.values = (x.index_select(2, keep) for x in (self.keys, self.values))
        self.slots, self.positions = self.slots[keep], self.positions[:, keep]
        self.rows = len(keep)
        self._move_out()

    def fork(self) -> DenseLayer:
        """Return a layer that stands on this one's rows without copying them; both may grow on their own."""
        if self.window is not None or not self.rows:
            return self._twin()
        span = self.start, self.seen
        shared = SharedRows(self.keys, self.values, self.slots, self.positions, span, self.clean)
        twin = DenseLayer((*self.sources, shared), self.seen, self.window, self.backend)
        self._lend(twin)
        return twin

    def _lend(self, twin: DenseLayer) -> None:
        """Let a fork write behind this layer's rows, where these are all that it stands on."""
        self._alone = False
        if self._room is not None and (self._base or not self.sources):
            twin._room, twin._base, twin._at = self._room, self._base + self.rows, self._at + self.rows
            self._room.enter(twin, twin._at)

    def _twin(self) -> DenseLayer:
        """The same layer once more, for few rows (sliding, or empty): its first append copies them."""
        twin = DenseLayer(self.sources, self.seen, self.window, self.backend)
        if self.is_initialized:
            twin.lazy_initialization(self.keys, self.values)
            twin.keys, twin.values, twin.rows, twin.start = self.keys, self.values, self.rows, self.start
            twin.slots, twin.positions, twin.clean = self.slots, self.positions, self.clean
        return twin

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that hold this layer's rows and its sources' entries."""
        own = [self.keys, self.values] if self.is_initialized else []
        return own + [t for source in self.sources for t in source.tensors()]

    def tensors_by_batch(self) -> list[tuple[int, list[torch.Tensor]]]:
        """Return (sequences that they are for, tensors) of the own rows and of each source."""
        of_sources = [(source.batch, source.tensors()) for source in self.sources]
        if not self.is_initialized:
            return of_sources
        known = {t.data_ptr() for _, tensors in of_sources for t in tensors}
        own = [t for t in self.tensors() if t.data_ptr() not in known]
        return [*of_sources, (self.keys.shape[0], own)]

    def nbytes(self) -> int:
        """Bytes of rows and entries (room that a buffer keeps is not counted)."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def entries(self) -> int:
        """Rows and memory entries per KV head."""
        return self.rows + sum(source.entries for source in self.sources)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices` of the batch; what is stored once for all of them stays."""
        if self.batch > 1 and self._base:  # the rows before the own ones are others now
            self._move_out()
        self.sources = tuple(source.select(indices) for source in self.sources)
        if self.rows and self.keys.shape[0] > 1:
            chosen = indices.to(self.device)
            self.keys, self.values = (x.index_select(0, chosen) for x in (self.keys, self.values))
            self._move_out()
        if self.positions.shape[0] > 1:
            self.positions = self.positions.index_select(0, indices.to(self.positions.device))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Follow the beams."""
        self.batch_select_indices(beam_idx)

    @property
    def batch(self) -> int:
        """Sequences that the layer tells apart; 1 serves any batch."""
        own = self.keys.shape[0] if self.rows else 1
        return max(own, *(source.batch for source in self.sources), 1)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))
