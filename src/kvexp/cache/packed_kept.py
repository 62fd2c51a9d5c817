"""Kept rows in few bits: the older rows of an evicting layer, head by head, with their true positions.

A *source* (`kvexp.cache.dense`) beside `KeptRows` and `RaggedRows`. Rows are packed part by part: one part
where all heads of all sequences hold equally many, else one for each sequence, or for each of its heads, so
that a head takes no more bytes than its rows do and a sequence is packed in a batch as it is alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvexp.attention.function import Call
from kvexp.attention.local import attend
from kvexp.cache.dense import DenseLayer
from kvexp.cache.packed_rows import PackedPair
from kvexp.cache.quantised_unit import QuantisedUnit, quantised
from kvexp.cache.rows import Each, Rows, expanded, over_heads
from kvexp.cache.scheme import Scheme
from kvexp.cache.source import State
from kvexp_kernels.merge_states import merge_states

Counts = list[list[int]]  # rows of each head of each sequence


@dataclass(frozen=True)
class Part:
    """m rows of each of b sequences and h heads; slots, positions and tracks [b, h, m] are not packed."""

    unit: QuantisedUnit
    slots: torch.Tensor
    positions: torch.Tensor
    tracks: dict[str, torch.Tensor]

    @classmethod
    def of(cls, rows: Rows, scheme: Scheme) -> Part:
        """Pack rows of which every one counts."""
        unit = quantised(rows.keys, rows.values, scheme)
        if unit.outliers is not None and not unit.outliers.rows.shape[-1]:
            unit = replace(unit, outliers=None)
        tracks = {name: track.clone() for name, track in rows.tracks.items()}
        return cls(unit, rows.slots.clone(), rows.positions.clone(), tracks)

    @property
    def count(self) -> int:
        """m."""
        return self.slots.shape[2]

    def rows(self, dtype: torch.dtype) -> Rows:
        """Return the rows as they come back."""
        return Rows(*self.unit.restored(dtype), self.slots, self.positions, None, self.tracks)

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor held."""
        unit, outliers = self.unit, self.unit.outliers
        found = [
            *unit.keys.tensors(),
            *unit.values.tensors(),
            *([] if outliers is None else outliers.tensors()),
        ]
        return [*found, self.slots, self.positions, *self.tracks.values()]

    def each(self, function: Each) -> Part:
        """Return a part made by applying `function`, which chooses sequences, to every tensor."""
        unit = self.unit
        outliers = None if unit.outliers is None else unit.outliers.each(function)
        chosen = QuantisedUnit(unit.keys.each(function), unit.values.each(function), outliers)
        tracks = {name: function(track) for name, track in self.tracks.items()}
        return Part(chosen, function(self.slots), function(self.positions), tracks)

    def state(self, call: Call, query: torch.Tensor) -> State:
        """Attend over all rows; `query` [B, Hq, T, D] holds the heads that read these, and comes later."""
        unit, outliers = self.unit, self.unit.outliers
        hidden = None if outliers is None else outliers.hidden(0, self.count)
        found = PackedPair(unit.keys, unit.values, hidden).state(call, query)
        if outliers is None:
            return found
        batch, heads, length = query.shape[:3]
        pair = expanded(call.module, outliers.keys, outliers.values)
        key, value = (x.expand(batch, -1, -1, -1) for x in pair)
        seen = over_heads(outliers.rows >= 0, heads)[:, :, None].expand(batch, -1, length, -1)
        return merge_states(*found, *attend(query, key, value, call.scale, seen))


class PackedKept:
    """Finished rows that every fork reads and none copies, `grid[b][h]` a part (None: no row).

    One list serves all sequences, and one part in a list all heads. `empty` [1, 1, 0] tells widths and dtype.
    """

    def __init__(self, grid: Sequence[list[Part | None]], empty: Rows, heads: int, clean: int) -> None:
        self.grid, self.empty, self.heads, self.clean = list(grid), empty, heads, clean
        held = [part for row in self.grid for part in row if part is not None]
        self.batch = len(self.grid) if len(self.grid) > 1 else held[0].slots.shape[0] if held else 1
        # Rows per KV head, the mean over heads, of the sequence that holds most (rounded up).
        self.entries = max(-(-sum(rows) // heads) for rows in self.counts())

    def counts(self) -> Counts:
        """Return the rows of each head of each sequence, one list where they serve any batch."""
        rows = [[0 if part is None else part.count for part in row] for row in self.grid]
        found = [heads * (self.heads // len(heads)) for heads in rows]
        return found * self.batch if len(found) == 1 else found

    def tensors(self) -> list[torch.Tensor]:
        """The shared tensors, by reference."""
        return [t for row in self.grid for part in row if part is not None for t in part.tensors()]

    def sequence(self, b: int) -> list[Part | None]:
        """Return the parts of sequence `b` alone."""
        if len(self.grid) > 1:
            return self.grid[b]
        at = b if self.batch > 1 else 0
        return _each(self.grid[0], lambda x: x[at : at + 1].clone())

    def select(self, index: torch.Tensor) -> PackedKept:
        """Return the rows of the sequences `index`; rows that serve any batch are shared on."""
        if self.batch == 1:
            return self
        if len(self.grid) > 1:
            grid = [self.grid[i] for i in index.tolist()]
        else:
            grid = [_each(self.grid[0], lambda x: x.index_select(0, index.to(x.device)))]
        return PackedKept(grid, self.empty, self.heads, self.clean)

    def unpack(self) -> Rows:
        """Return the rows as a rectangle, masked on the left where a head holds fewer."""
        return _beside([_beside([self._rows(part, row) for part in row], 1) for row in self.grid], 0)

    def _rows(self, part: Part | None, row: list[Part | None]) -> Rows:
        if part is not None:
            return part.rows(self.empty.keys.dtype)
        heads = self.heads // len(row)
        return self.empty.each(lambda x: x.expand(1, heads, *x.shape[2:]))

    def state(self, call: Call, layer: DenseLayer) -> State:
        """Attend over the rows, part by part; every query comes later than all of them."""
        call.padding.refuse_inside(0, self.clean)
        states = []
        for b, row in enumerate(self.grid):
            query = call.query if len(self.grid) == 1 else call.query[b : b + 1]
            width = query.shape[1] // len(row)
            of_heads = [
                _state(part, call, query[:, h * width : (h + 1) * width]) for h, part in enumerate(row)
            ]
            states.append((torch.cat([a for a, _ in of_heads], 1), torch.cat([s for _, s in of_heads], 1)))
        return torch.cat([a for a, _ in states]), torch.cat([s for _, s in states])


def pack(
    rows: Rows,
    held: Counts,
    counts: Counts,
    scheme: Scheme,
    clean: int,
    carried: Mapping[int, list[Part | None]] | None = None,
) -> PackedKept:
    """Pack the first `counts[b][h]` of the `held[b][h]` rows of each head, which stand at its right end.

    `carried`: sequences whose packed rows are those of before, as they are.
    """
    carried = carried or {}
    heads, length = rows.slots.shape[1:]

    def part(b: slice, h: slice, there: int, count: int) -> Part | None:
        span = slice(length - there, length - there + count)
        chosen = replace(rows, valid=None).each(lambda x: x[b, h, span])
        return Part.of(chosen, scheme) if count else None

    pairs = [list(zip(*both, strict=True)) for both in zip(held, counts, strict=True)]
    everything = slice(None)
    if not carried and len({pair for of_heads in pairs for pair in of_heads}) == 1:
        grid = [[part(everything, everything, *pairs[0][0])]]
    else:
        grid = []
        for b, of_heads in enumerate(pairs):
            mine = slice(b, b + 1)
            if b in carried:
                grid.append(carried[b])
            elif len(set(of_heads)) == 1:
                grid.append([part(mine, everything, *of_heads[0])])
            else:
                grid.append([part(mine, slice(h, h + 1), *pair) for h, pair in enumerate(of_heads)])
    empty = replace(rows, valid=None).each(lambda x: x[:1, :1, :0].clone())
    return PackedKept(grid, empty, heads, clean)


def latest(rows: Rows, counts: Counts) -> Rows:
    """Return the last `counts[b][h]` rows of each head, masked on the left where it has fewer than others."""
    most, length = max(map(max, counts)), rows.slots.shape[2]
    last = replace(rows, valid=None).each(lambda x: x[:, :, length - most :].clone())
    if min(map(min, counts)) == most:
        return last
    places = torch.arange(most, device=rows.slots.device)
    return replace(last, valid=places >= most - torch.tensor(counts, device=places.device)[..., None])


def _each(row: Sequence[Part | None], function: Each) -> list[Part | None]:
    return [None if part is None else part.each(function) for part in row]


def _state(part: Part | None, call: Call, query: torch.Tensor) -> State:
    """Return the state over a part's rows, that of no row where there is none."""
    if part is not None:
        return part.state(call, query)
    nothing = query.new_zeros(*query.shape[:3], call.value.shape[-1])
    lse = torch.float64 if query.dtype == torch.float64 else torch.float32
    return nothing, torch.full_like(nothing[..., 0], -torch.inf, dtype=lse)


def _beside(parts: list[Rows], dim: int) -> Rows:
    """Return rows of other heads (dim 1) or sequences (dim 0) as one rectangle, each at its right end."""
    if len(parts) == 1:
        return parts[0]
    longest = max(part.slots.shape[2] for part in parts)
    names = {name for part in parts for name in part.tracks}

    def widened(part: Rows) -> Rows:
        zeros = torch.zeros_like(part.slots, dtype=torch.float32)
        tracks = {name: part.tracks.get(name, zeros) for name in names}
        missing = longest - part.slots.shape[2]
        return replace(part, valid=part.mask(), tracks=tracks).each(
            lambda x: torch.cat([x.new_zeros(*x.shape[:2], missing, *x.shape[3:]), x], dim=2)
        )

    masked = any(part.valid is not None or part.slots.shape[2] < longest for part in parts)
    wide = [widened(part) for part in parts]
    keys, values, slots, positions = (torch.cat([x.tensors()[i] for x in wide], dim=dim) for i in range(4))
    valid = torch.cat([x.mask() for x in wide], dim=dim) if masked else None
    tracks = {name: torch.cat([x.tracks[name] for x in wide], dim=dim) for name in names}
    return Rows(keys, values, slots, positions, valid, tracks)
