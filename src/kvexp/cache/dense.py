"""A cache layer that keeps every row it is given, and may stand on states that were computed before.

A layer's own rows are `keys`/`values` [B, H, S, D]. What came before them can be held by *sources*: shared
rows of an encoded context (`SharedRows`), or a memory that is looked up (`kvexp.cache.virtual`). A source
gives an attention state (a, lse) for each query; the layer merges it with its local attention.

Two coordinates, never mixed: a row's *slot* is its column in the whole sequence, pads counted (causality,
padding); its *position* is the rotary one (sliding windows). `seen` counts tokens, `rows` counts rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers.cache_utils import CacheLayerMixin

from kvexp.attention.function import Call
from kvexp.attention.local import attend, attend_without_lse
from kvexp.cache.shared import SharedRows
from kvexp_kernels.merge_states.reference import merge_states

SLACK = 64  # rows of room that a growing buffer keeps, so that decoding does not copy at every token


class Source(Protocol):
    """Attention states over something that is no longer (or not only) this layer's own rows."""

    entries: int
    batch: int  # sequences that it tells apart; 1 serves any batch

    def state(self, call: Call, layer: DenseLayer) -> State:
        """Return (a [B, Hq, T, Dv], lse [B, Hq, T]) for the queries of `call`."""
        ...

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors held, for counting bytes."""
        ...

    def select(self, index: torch.Tensor) -> Source:
        """Return the source of the sequences `index`, itself where it serves any."""
        ...


State = tuple[torch.Tensor, torch.Tensor]  # (a [B, Hq, T, Dv], lse [B, Hq, T])
Observer = Callable[["DenseLayer", Call, list[State], State], None]


class DenseLayer(CacheLayerMixin):
    """Keeps all rows; with sources it merges their states with attention over its own rows."""

    is_sliding = False
    observer: Observer | None = None  # sees the states of all sources and of the own rows before the merge
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(
        self,
        sources: tuple[Source, ...] = (),
        seen: int = 0,
        window: int | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.sources, self.seen, self.window, self.backend = sources, seen, window, backend
        self.slots = torch.empty(0, dtype=torch.long)  # [S]
        self.positions = torch.empty(1, 0, dtype=torch.long)  # [1 or B, S]
        self.rows = 0
        self.start = 0  # no own row has a lower slot; known without asking the device
        self.pending = False  # rows were appended, and our attention function has not been called since
        self.clean = 0  # the own rows at lower slots were real tokens in every sequence
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take device and dtype from the first rows."""
        self.device, self.dtype = key_states.device, key_states.dtype
        self.slots, self.positions = self.slots.to(self.device), self.positions.to(self.device)
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        self.is_initialized = True

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
        self.q_slots = torch.arange(self.seen, self.seen + length, device=self.device)
        positions = kwargs.get("position_ids")
        self.q_positions = self.q_slots[None] if positions is None else positions.to(self.device)
        self._append(key_states, value_states)
        self._place()
        self.seen += length
        kwargs["kvexp"] = self
        self.pending = True
        return self.keys, self.values

    def _place(self) -> None:
        """Remember where the new rows stand."""
        self.slots = torch.cat([self.slots, self.q_slots])
        old, new = self.positions, self.q_positions
        if old.shape[0] != new.shape[0]:
            batch = max(old.shape[0], new.shape[0])
            old, new = old.expand(batch, -1), new.expand(batch, -1)
        self.positions = torch.cat([old, new], dim=-1)

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Write new rows behind the old ones, in a buffer with room."""
        if not self.rows:
            self.start = self.seen
        end = self.rows + key_states.shape[-2]
        fits = self._buffers is not None and (
            self._buffers[0].shape[2] >= end and self._buffers[0].shape[0] == key_states.shape[0]
        )
        if not fits:
            room = end if self.rows == 0 else end + max(SLACK, end // 8)
            self._buffers = tuple(  # type: ignore[assignment]
                self._grown(old, new, room)
                for old, new in ((self.keys, key_states), (self.values, value_states))
            )
        assert self._buffers is not None
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.rows : end] = new
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        self.rows = end

    def _grown(self, old: torch.Tensor, new: torch.Tensor, room: int) -> torch.Tensor:
        buffer = new.new_empty(new.shape[0], new.shape[1], room, new.shape[3])
        if self.rows:
            buffer[:, :, : self.rows] = old  # a context encoded once (batch 1) widens to the batch here
        return buffer

    def visible(self, call: Call) -> torch.Tensor | None:
        """Return which rows each query may see, bool [B or 1, 1, T, S]; None when all rows are visible."""
        window = self._window(call)
        real = call.padding.at(self.slots) if call.padding.pads(self.start, self.seen) else None
        if self.q_slots.numel() == 1 and real is None and window is None:
            return None
        allowed = (self.slots[None, :] <= self.q_slots[:, None])[None]  # [1, T, S]
        if window is not None:  # distances are rotary ones: pads between context and query do not widen them
            distance = self.q_positions[:, :, None] - self.positions[:, None, :]
            allowed = allowed & (distance < window)
        if real is not None:
            allowed = allowed & real[:, None, :]
            # A padded query sees itself: a row without any key would spread NaN to later layers.
            allowed = allowed | (self.slots[None, None, :] == self.q_slots[None, :, None])
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

    def attend(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (output [B, Hq, T, Dv], lse or None) over the sources and the layer's own rows."""
        self.pending = False
        call.padding.refuse_inside(self.start, self.clean)
        if not call.padding.pads(self._clean_from, self.seen):
            self.clean = self.seen
        causal = self._is_triangle(call)
        visible = None if causal else self.visible(call)
        if not (self.sources or call.needs_lse or self.wants_lse):
            return attend_without_lse(call.query, call.key, call.value, call.scale, visible, causal), None
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
        self.rows, self._buffers = len(keep), None

    def fork(self) -> DenseLayer:
        """Return a layer that stands on this one's rows without copying them; both may grow on their own."""
        if self.window is not None or not self.rows:
            return self._twin()
        span = self.start, self.seen
        shared = SharedRows(self.keys, self.values, self.slots, self.positions, span, self.clean)
        return DenseLayer((*self.sources, shared), self.seen, self.window, self.backend)

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

    def get_seq_length(self) -> int:
        """Tokens seen (not rows stored): transformers takes positions and the uncached rest from it."""
        return self.seen

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns, offset) that make transformers ask for a mask of the whole sequence."""
        return self.seen + query_length, 0

    def reset(self) -> None:
        """Refuse: encode the context again instead."""
        raise RuntimeError("a kvexp cache cannot be reset in place: encode the context again")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices` of the batch; what is stored once for all of them stays."""
        self.sources = tuple(source.select(indices) for source in self.sources)
        if self.rows and self.keys.shape[0] > 1:
            chosen = indices.to(self.device)
            self.keys, self.values = (x.index_select(0, chosen) for x in (self.keys, self.values))
            self._buffers = None
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
