"""A cache layer whose older rows are held in few bits (`kvexp.cache.scheme` says which, and when).

Groups of a sequence count its real tokens, so that pads shift none and a sequence has the same cache in a
batch as alone. While all sequences advance together they share one lane; where a forward holds pads, each
gets a lane of its own. Rows that are finished when a layer is forked stand in a source (`PackedRows`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvexp.attention.function import Call
from kvexp.attention.local import attend, attend_without_lse
from kvexp.cache.dense import DenseLayer
from kvexp.cache.kv_cache import KVCache
from kvexp.cache.lane import Lane
from kvexp.cache.packed_rows import PackedRows, state_of
from kvexp.cache.scheme import Scheme
from kvexp.cache.source import Source, State
from kvexp.errors import UserError
from kvexp_kernels.merge_states import merge_states


class QuantisedLayer(DenseLayer):
    """Keeps every row; `packs` says whether those that are appended are packed when they are due.

    Rows are packed after the forward that appended or outdated them: it still read them in full.
    """

    def __init__(
        self,
        scheme: Scheme,
        counters: dict[str, int],
        sources: Sequence[Source] = (),
        seen: int = 0,
        backend: str = "auto",
    ) -> None:
        super().__init__(tuple(sources), seen, None, backend)
        self.scheme, self.counters, self.packs = scheme, counters, True
        self.lanes: list[Lane] = []  # one, or one for each sequence
        self._real: torch.Tensor | None = None  # which of the latest tokens are real, [B, T]; None: all

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Hold the new rows until attention is called, which knows the padding."""
        self.keys, self.values = key_states, value_states

    def _place(self) -> None:
        """Rows of a lane stand in their order, and their positions are in their keys: nothing to note."""

    def attend(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (output [B, Hq, T, Dv], lse or None) over sources, packed rows and rows in full."""
        self.pending = False
        call.padding.refuse_inside(0, self.clean)
        if not call.padding.pads(0, self.seen):
            self.clean = self.seen
        padded = call.padding.pads(self.seen - self.q_slots.numel(), self.seen)
        self._real = call.padding.at(self.q_slots) if padded else None
        self.take(self.keys, self.values, self._real)
        before = [source.state(call, self) for source in self.sources]
        pairs = [lane.pair() for lane in self.lanes]
        if any(pair is not None for pair in pairs):
            before.append(state_of(pairs, call))
        if not (before or call.needs_lse) and len(self.lanes) == 1:
            rows = self.lanes[0].local(call, self._columns(0))
            return attend_without_lse(
                call.query, rows.key, rows.value, call.scale, rows.visible, rows.causal
            ), None
        local = self._local(call)
        if self.observer is not None:
            self.observer(self, call, before, local)
        output, lse = local
        for a, s in before:
            output, lse = merge_states(a.to(output.dtype), s, output, lse)
        return output, lse

    def take(self, keys: torch.Tensor, values: torch.Tensor, real: torch.Tensor | None) -> None:
        """Append rows [B, H, T, D], of which `real` [B, T] are no pads (None: all), to the lanes."""
        batch = keys.shape[0]
        if not self.lanes:
            self.lanes = [Lane(self.scheme, keys[:, :, :0], values[:, :, :0])]
        apart = real is not None and batch > 1
        if len(self.lanes) == 1 and (apart or self.lanes[0].batch != batch):
            self.release()  # the rest is short, and is copied
            lane = self.lanes[0].each(lambda x: x.expand(batch, *x.shape[1:]))
            self.lanes = [_only(lane, b) for b in range(batch)] if apart else [lane]
        several = len(self.lanes) > 1
        for b, lane in enumerate(self.lanes):
            new = (keys[b : b + 1], values[b : b + 1]) if several else (keys, values)
            if real is not None:
                new = new[0][:, :, real[b]], new[1][:, :, real[b]]
            lane.append(*new)

    def _columns(self, b: int) -> torch.Tensor | None:
        return None if self._real is None else self._real[b].nonzero()[:, 0]

    def _local(self, call: Call) -> State:
        """Return the state over the rows in full, lane by lane."""
        states = []
        for b, lane in enumerate(self.lanes):
            query = call.query if len(self.lanes) == 1 else call.query[b : b + 1]
            rows = lane.local(call, self._columns(b))
            states.append(
                attend(query, rows.key, rows.value, call.scale, rows.visible, rows.causal, self.backend)
            )
        return torch.cat([a for a, _ in states]), torch.cat([s for _, s in states])

    def after(self, call: Call) -> None:
        """Pack the rows that are due now."""
        self._forget()
        if self.packs:
            self.settle()

    def _forget(self) -> None:
        """Let go of the latest rows, which lanes have taken: an empty view would keep them alive."""
        self.keys, self.values = (x.new_empty(*x.shape[:2], 0, x.shape[3]) for x in (self.keys, self.values))

    def settle(self) -> None:
        """Pack the rows that are due."""
        count = sum(lane.settle() * lane.batch for lane in self.lanes)
        self.counters["quantised"] = self.counters.get("quantised", 0) + count

    def release(self) -> None:
        """Let a source hold the packed rows, so that forks share them."""
        pairs = [lane.release() for lane in self.lanes]
        if any(pair is not None for pair in pairs):
            self.sources = (*self.sources, PackedRows(pairs))

    def fork(self) -> QuantisedLayer:
        """Return a layer that continues from here; packed rows are shared, none is copied at first."""
        self.release()
        twin = QuantisedLayer(self.scheme, self.counters, self.sources, self.seen, self.backend)
        if self.is_initialized:
            twin.lazy_initialization(self.keys, self.values)
        twin.lanes = [lane.each(lambda x: x) for lane in self.lanes]
        twin.clean, twin.packs = self.clean, self.packs
        return twin

    def compact(self, keep: torch.Tensor) -> None:
        """Refuse: rows that share a group cannot leave it."""
        raise RuntimeError("no row can leave a quantised cache: choose the rows before they are packed")

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that hold this layer's rows, packed and in full, and its sources' entries."""
        own = [t for lane in self.lanes for t in lane.tensors()]
        return own + [t for source in self.sources for t in source.tensors()]

    def tensors_by_batch(self) -> list[tuple[int, list[torch.Tensor]]]:
        """Return (sequences that they are for, tensors) of the own rows and of each source."""
        of_sources = [(source.batch, source.tensors()) for source in self.sources]
        own = [t for lane in self.lanes for t in lane.tensors()]
        return [*of_sources, (self._own_batch, own)] if own else of_sources

    def entries(self) -> int:
        """Rows per KV head of the longest sequence, and entries of sources that hold something else."""
        others = [source for source in self.sources if not isinstance(source, PackedRows)]
        return max((lane.rows for lane in self.lanes), default=0) + sum(s.entries for s in others)

    @property
    def _own_batch(self) -> int:
        return len(self.lanes) if len(self.lanes) != 1 else self.lanes[0].batch

    @property
    def batch(self) -> int:
        """Sequences that the layer tells apart; 1 serves any batch."""
        return max(self._own_batch, *(source.batch for source in self.sources), 1)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices` of the batch; what is stored once for all of them stays."""
        self.sources = tuple(source.select(indices) for source in self.sources)
        if len(self.lanes) > 1:
            self.lanes = [self.lanes[b].each(lambda x: x) for b in indices.tolist()]
        elif self._own_batch > 1:
            chosen = indices.to(self.device)
            self.lanes = [self.lanes[0].each(lambda x: x.index_select(0, chosen))]


def quantised_cache(cache: KVCache, schemes: Sequence[Scheme], decode: bool = True) -> KVCache:
    """Return a cache that holds the rows of `cache`, finished or empty, as `schemes` (one a layer) say.

    Takes the caches of methods that keep their rows in dense layers; what such a layer stands on (a shared
    context, a memory) stays as it is, and so do sliding layers, which forget on their own. `decode`: rows
    that are appended later are packed too, when they are due. Raises UserError for other layers.
    """
    layers = [
        layer if layer.window is not None else _quantised(layer, scheme, cache, decode)
        for layer, scheme in zip(cache.layers, schemes, strict=True)
    ]
    return KVCache(layers, cache.counters, columns=cache.columns)


def _quantised(layer: DenseLayer, scheme: Scheme, cache: KVCache, decode: bool) -> QuantisedLayer:
    if type(layer) is not DenseLayer:
        raise UserError(
            "the rows of this cache may still leave it, and packed rows cannot: quantise the cache of full,"
            " truncate or a reuse method"
        )
    twin = QuantisedLayer(scheme, cache.counters, layer.sources, layer.seen, layer.backend)
    twin.clean, twin.packs = layer.clean, decode
    if layer.rows:
        twin.lazy_initialization(layer.keys, layer.values)
        twin._forget()
        real = None if cache.columns is None else cache.columns.to(layer.keys.device)[:, layer.slots]
        twin.take(layer.keys, layer.values, None if real is None or bool(real.all()) else real)
        twin.settle()
        twin.release()
    return twin


def _only(lane: Lane, b: int) -> Lane:
    """Return a lane of sequence `b` alone."""
    return lane.each(lambda x: x[b : b + 1])
