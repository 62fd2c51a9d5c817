"""Rows of a cache that differ from head to head: what an evicting layer keeps, and two ways to store it.

`Rows` is rectangular, [B, H, S, D], with a mask where a sequence or a head holds fewer rows than another.
`KeptRows` and `RaggedRows` are *sources* (`kvexp.cache.dense`): finished rows that queries of any fork attend
to. Ragged rows lie end to end, so that heads of different lengths take no more bytes than they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvexp.attention.function import Call
from kvexp.attention.local import attend
from kvexp_kernels.backend import fused
from kvexp_kernels.ragged_attend import ragged_attend

if TYPE_CHECKING:
    from kvexp.cache.dense import DenseLayer
    from kvexp.cache.source import State

Each = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Rows:
    """keys/values [B, H, S, D], slots/positions [B, H, S] int32, tracks [B, H, S] float32 by name.

    `valid` [B, H, S] bool, or None when every row counts. Rows of a head are in the order of their slots.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    valid: torch.Tensor | None = None
    tracks: dict[str, torch.Tensor] = field(default_factory=dict)

    def each(self, function: Each) -> Rows:
        """Return rows made by applying `function` to every tensor."""
        return Rows(
            function(self.keys),
            function(self.values),
            function(self.slots),
            function(self.positions),
            None if self.valid is None else function(self.valid),
            {name: function(track) for name, track in self.tracks.items()},
        )

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor held."""
        found = [self.keys, self.values, self.slots, self.positions, *self.tracks.values()]
        return found if self.valid is None else [*found, self.valid]

    def expand(self, batch: int) -> Rows:
        """Return the rows for `batch` sequences (a view where one context serves all)."""
        if self.keys.shape[0] == batch:
            return self
        return self.each(lambda x: x.expand(batch, *x.shape[1:]))

    def select(self, index: torch.Tensor) -> Rows:
        """Return the rows of the sequences `index`."""
        return self.each(lambda x: x.index_select(0, index.to(x.device)))

    def mask(self) -> torch.Tensor:
        """Return which rows count, [B, H, S] bool."""
        return torch.ones_like(self.slots, dtype=torch.bool) if self.valid is None else self.valid

    def gather(self, keep: torch.Tensor, valid: torch.Tensor | None) -> Rows:
        """Return the rows at `keep` [B, H, n] (indices into S); `valid` says which of these count."""

        def take(x: torch.Tensor) -> torch.Tensor:
            index = keep if x.dim() == 3 else keep[..., None].expand(*keep.shape, x.shape[-1])
            return x.gather(2, index)

        kept = self.each(take)
        return Rows(kept.keys, kept.values, kept.slots, kept.positions, valid, kept.tracks)


def join(parts: list[Rows]) -> Rows:
    """Return rows one part after the other; a track that a part lacks is zero there."""
    if len(parts) == 1:
        return parts[0]
    batch = max(part.keys.shape[0] for part in parts)
    parts = [part.expand(batch) for part in parts]
    names = {name for part in parts for name in part.tracks}

    def track(part: Rows, name: str) -> torch.Tensor:
        return part.tracks.get(name, torch.zeros_like(part.slots, dtype=torch.float32))

    masked = any(part.valid is not None for part in parts)
    return Rows(
        torch.cat([part.keys for part in parts], dim=2),
        torch.cat([part.values for part in parts], dim=2),
        torch.cat([part.slots for part in parts], dim=2),
        torch.cat([part.positions for part in parts], dim=2),
        torch.cat([part.mask() for part in parts], dim=2) if masked else None,
        {name: torch.cat([track(part, name) for part in parts], dim=2) for name in names},
    )


def expanded(module: Any, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return stored rows as per-head keys and values (MLA stores latents)."""
    return module.expand_kv(keys, values) if hasattr(module, "expand_kv") else (keys, values)


def over_heads(mask: torch.Tensor, heads: int) -> torch.Tensor:
    """Return a mask [B, H, ...] of KV heads for the `heads` query heads that read them."""
    return mask if mask.shape[1] in (1, heads) else mask.repeat_interleave(heads // mask.shape[1], dim=1)


class KeptRows:
    """Rectangular rows that every fork reads and none copies."""

    def __init__(self, rows: Rows, seen: int, clean: int) -> None:
        self.rows, self.seen, self.clean = rows, seen, clean
        self.batch, self.entries = rows.keys.shape[0], rows.keys.shape[2]

    def tensors(self) -> list[torch.Tensor]:
        """The shared tensors, by reference."""
        return self.rows.tensors()

    def select(self, index: torch.Tensor) -> KeptRows:
        """Return the rows of the sequences `index`; rows that serve any batch are shared on."""
        return self if self.batch == 1 else KeptRows(self.rows.select(index), self.seen, self.clean)

    def unpack(self) -> Rows:
        """Return the rows."""
        return self.rows

    def state(self, call: Call, layer: DenseLayer) -> State:
        """Attend over the rows; every query comes later than all of them."""
        call.padding.refuse_inside(0, self.clean)
        key, value = expanded(call.module, self.rows.keys, self.rows.values)
        batch, heads, length, width = call.query.shape
        if self.batch == 1 and self.rows.valid is None:  # one long block of queries for the whole batch
            folded = call.query.transpose(0, 1).reshape(1, heads, batch * length, width)
            a, s = attend(folded, key, value, call.scale, backend=layer.backend)
            a = a.view(heads, batch, length, -1).transpose(0, 1)
            return a, s.view(heads, batch, length).transpose(0, 1)
        visible = None
        if self.rows.valid is not None:
            visible = over_heads(self.rows.valid, heads)[:, :, None, :].expand(batch, -1, length, -1)
        key, value = (x.expand(batch, -1, -1, -1) for x in (key, value))
        return attend(call.query, key, value, call.scale, visible, backend=layer.backend)


class RaggedRows:
    """Rows end to end, [N, D]: sequence by sequence, head by head, `lengths[b][h]` of each."""

    def __init__(self, rows: Rows, seen: int, clean: int) -> None:
        mask = rows.mask()
        self.lengths: list[list[int]] = mask.sum(-1).tolist()
        self.flat = rows.each(lambda x: x[mask])  # boolean indexing runs over b, then h, then s
        self.seen, self.clean, self.batch = seen, clean, rows.keys.shape[0]
        self.heads = rows.keys.shape[1]
        self._spans: tuple[torch.Tensor, torch.Tensor] | None = None  # where each head's rows begin, how many
        # Rows per KV head, the mean over heads, of the sequence that holds most (rounded up).
        self.entries = max(-(-sum(lengths) // self.heads) for lengths in self.lengths)

    def tensors(self) -> list[torch.Tensor]:
        """The flat tensors, without the mask, which holds nothing."""
        return [x for x in self.flat.tensors() if x is not self.flat.valid]

    def unpack(self) -> Rows:
        """Return the rows as a rectangle, masked on the left where a head holds fewer."""
        longest = max(max(lengths) for lengths in self.lengths)
        shape = (self.batch, self.heads, longest)
        mask = torch.zeros(shape, dtype=torch.bool, device=self.flat.keys.device)
        for b, lengths in enumerate(self.lengths):
            for h, length in enumerate(lengths):
                mask[b, h, longest - length :] = True

        def spread(x: torch.Tensor) -> torch.Tensor:
            return x.new_zeros(*shape, *x.shape[1:]).masked_scatter(_like(mask, x), x)

        rows = self.flat.each(spread)
        return Rows(rows.keys, rows.values, rows.slots, rows.positions, mask, rows.tracks)

    def select(self, index: torch.Tensor) -> RaggedRows:
        """Return the rows of the sequences `index`; rows that serve any batch are shared on."""
        if self.batch == 1:
            return self
        return RaggedRows(self.unpack().select(index), self.seen, self.clean)

    def state(self, call: Call, layer: DenseLayer) -> State:
        """Attend head by head: each has its own length. One kernel does it where there is one."""
        call.padding.refuse_inside(0, self.clean)
        if fused(call.query, self.flat.keys, self.flat.values):
            return self.at_once(call)
        _, heads, length, width = call.query.shape
        group = heads // self.heads
        outputs: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        start = 0
        for lengths in self.lengths:
            row = len(outputs) // self.heads
            for h, rows in enumerate(lengths):
                span = slice(start, start + rows)
                start += rows
                query = call.query[:, h * group : (h + 1) * group] if self.batch == 1 else None
                if query is None:
                    query = call.query[row : row + 1, h * group : (h + 1) * group]
                folded = query.transpose(0, 1).reshape(1, group, -1, width)
                key, value = (x[span][None, None] for x in (self.flat.keys, self.flat.values))
                a, s = attend(folded, key, value, call.scale, backend=layer.backend)
                outputs.append(a.view(group, -1, length, a.shape[-1]).transpose(0, 1))
                sums.append(s.view(group, -1, length).transpose(0, 1))
        a, s = (_by_sequence(parts, self.heads, self.batch) for parts in (outputs, sums))
        return a, s

    def at_once(self, call: Call) -> State:
        """Attend to the rows of all heads in one operation."""
        if self._spans is None:
            lengths = torch.tensor(self.lengths)
            starts = lengths.flatten().cumsum(0).view_as(lengths) - lengths
            self._spans = starts.to(self.flat.keys.device), lengths.to(self.flat.keys.device)
        longest = max(map(max, self.lengths))
        return ragged_attend(call.query, self.flat.keys, self.flat.values, *self._spans, call.scale, longest)


def _by_sequence(parts: list[torch.Tensor], heads: int, stored: int) -> torch.Tensor:
    """Put the states of (sequence, head) pairs together as [B, Hq, T, ...]."""
    return torch.cat([torch.cat(parts[b * heads : (b + 1) * heads], dim=1) for b in range(stored)], dim=0)


def _like(mask: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    return mask if flat.dim() == 1 else mask[..., None].expand(*mask.shape, flat.shape[-1])
