"""An evicting layer that packs what has stayed: older rows in few bits, the newest ones and new ones in full.

At each compression the packed rows are unpacked, chosen from, and packed again, in groups that are counted
anew. A sequence of which no row leaves then (its turn has not come) keeps its packed rows as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvexp.cache.evicting import EvictingLayer
from kvexp.cache.kv_cache import KVCache
from kvexp.cache.packed_kept import Counts, PackedKept, latest, pack
from kvexp.cache.rows import KeptRows, RaggedRows, Rows
from kvexp.cache.scheme import Scheme
from kvexp.cache.source import Source


class PackingLayer(EvictingLayer):
    """Packs all rows of a head but its `residual` newest, keys and values, whenever some leave its sequence.

    The counter `quantised` counts them each time, the mean over heads (rounded up) of each sequence.
    """

    def __init__(
        self,
        index: int,
        scheme: Scheme,
        counters: dict[str, int],
        sources: Sequence[Source] = (),
        seen: int = 0,
        backend: str = "auto",
    ) -> None:
        super().__init__(index, sources, seen, backend)
        self.scheme, self.counters = scheme, counters
        self._before: PackedKept | None = None  # the packed rows that `own` has unpacked
        self._closed: list[tuple[int, list[torch.Tensor]]] | None = None  # what was held before it did

    @classmethod
    def taking(cls, layer: EvictingLayer, scheme: Scheme, counters: dict[str, int]) -> PackingLayer:
        """Return a layer that takes over everything that `layer` holds."""
        twin = cls(layer.index, scheme, counters)
        vars(twin).update(vars(layer))
        return twin

    def own(self) -> None:
        """Take over the rows that sources hold, in front of the layer's own, unpacked for a choice."""
        for source in self.sources:
            if isinstance(source, PackedKept):
                self._before, self._closed = source, super().tensors_by_batch()
        super().own()

    def _forget(self) -> None:
        """The rows that were packed are packed again, or held in full from now on."""
        self._before = self._closed = None

    def update(self, key_states, value_states, *args, kwargs=None, **more):
        """Append rows."""
        self._forget()
        return super().update(key_states, value_states, *args, kwargs=kwargs, **more)

    def tensors_by_batch(self) -> list[tuple[int, list[torch.Tensor]]]:
        """Return (sequences that they are for, tensors) of sources and own rows, as before an `own`.

        Rows that are unpacked while some are chosen are a copy, as those are that other layers make then.
        """
        return super().tensors_by_batch() if self._closed is None else self._closed

    def settle(self, tokens: Sequence[int]) -> None:
        """Pack what has stayed of each sequence's `tokens`, where some have left and none is packed yet."""
        held = self._counts()
        fewer = [sum(heads) < len(heads) * n for heads, n in zip(held, tokens, strict=True)] if held else []
        if any(fewer):
            ragged = any(isinstance(source, RaggedRows) for source in self.sources)
            self.own()
            self._pack(self.held(), held, fewer, ragged)

    def _store(self, rows: Rows, ragged: bool) -> None:
        held, before = rows.mask().sum(-1).tolist(), self.held().mask().sum((1, 2)).tolist()
        fewer = [sum(heads) < n for heads, n in zip(held, before, strict=True)]
        self._pack(rows, held, fewer, ragged)

    def _pack(self, rows: Rows, held: Counts, fewer: Sequence[bool], ragged: bool) -> None:
        """Hold rows of which those that count, `held` of each head, stand at its right end."""
        earlier = self._before
        self._forget()
        packed = [] if earlier is None else earlier.counts()
        counts, carried = [], {}
        for b, heads in enumerate(held):
            if fewer[b]:
                counts.append([max(0, n - self.scheme.residual) for n in heads])
            elif earlier is None:
                counts.append([0] * len(heads))
            else:
                counts.append(packed[b if len(packed) > 1 else 0])
                carried[b] = earlier.sequence(b)
        if not any(map(any, counts)):
            super()._store(rows, ragged)
            return
        left = [[n - m for n, m in zip(*both, strict=True)] for both in zip(held, counts, strict=True)]
        source = pack(rows, held, counts, self.scheme, self.clean, carried)
        self.sources = (*self.sources, source)
        super()._store(latest(rows, left), ragged and any(len(set(heads)) > 1 for heads in left))
        new = [-(-sum(heads) // len(heads)) for heads, act in zip(counts, fewer, strict=True) if act]
        self.counters["quantised"] = self.counters.get("quantised", 0) + sum(new)

    def _counts(self) -> Counts:
        """Return the rows that each head of each sequence holds, in sources and here; nothing: no row."""
        parts: list[Counts] = []
        for source in self.sources:
            if isinstance(source, KeptRows):
                parts.append(source.rows.mask().sum(-1).tolist())
            elif isinstance(source, RaggedRows):
                parts.append(source.lengths)
            elif isinstance(source, PackedKept):
                parts.append(source.counts())
        if self.rows:
            parts.append(self.held().mask().sum(-1).tolist())
        batch = max(map(len, parts), default=0)
        whole = [part if len(part) == batch else part * batch for part in parts]
        return [[sum(head) for head in zip(*of_one, strict=True)] for of_one in zip(*whole, strict=True)]

    def entries(self) -> int:
        """Rows per KV head, the mean over heads (rounded up), of the sequence that holds most."""
        return max((-(-sum(heads) // len(heads)) for heads in self._counts()), default=0)

    def _successor(self, sources: Sequence[Source]) -> PackingLayer:
        return PackingLayer(self.index, self.scheme, self.counters, sources, self.seen, self.backend)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices` of the batch; what is stored once for all of them stays."""
        self._forget()
        super().batch_select_indices(indices)


def packing_cache(cache: KVCache, schemes: Sequence[Scheme]) -> KVCache:
    """Return an evicting cache whose rows are packed from now on whenever some leave, as `schemes` say.

    Where some have left already, what has stayed is packed now. `cache` must not be used any more.
    """
    layers = [
        PackingLayer.taking(layer, scheme, cache.counters) if isinstance(layer, EvictingLayer) else layer
        for layer, scheme in zip(cache.layers, schemes, strict=True)
    ]
    tokens = None if cache.columns is None else cache.columns.sum(1).tolist()
    for layer in layers:
        if isinstance(layer, PackingLayer):
            layer.settle([layer.seen] * layer.batch if tokens is None else tokens)
    return KVCache(layers, cache.counters, cache.evictor, cache.columns)
