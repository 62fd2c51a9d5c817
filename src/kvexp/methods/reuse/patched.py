"""What a decoder layer gets as its cache while some rows of a batch are recomputed.

A model runs over the chosen rows alone: their fresh keys and values come in, a *patch* puts them into the
sheet and may correct the other rows, and the rows attend over everything in the sheet that stands before
them. Causality goes by columns and not by the number of rows, so masks that are aligned to one corner (a
causal flag) would be wrong; rows are sorted and attend in blocks, each over the columns up to its last row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kvexp.attention.families import layer_windows
from kvexp.attention.function import Call
from kvexp.attention.local import attend, attend_without_lse
from kvexp.attention.options import options_of
from kvexp.attention.rerotate import Pair
from kvexp.methods.reuse.geometry import Geometry
from kvexp.methods.reuse.sheet import Sheet

BLOCK = 64  # rows that attend at a time: no mask is larger than this many rows


@dataclass(frozen=True)
class RowSet:
    """Rows that run through the model: columns [B, R] in order, `valid` [B, R] where a sequence has as many.

    Rows that are not valid stand in the column `nowhere`, which no other row sees.
    """

    geometry: Geometry
    columns: torch.Tensor
    valid: torch.Tensor

    @classmethod
    def of(cls, geometry: Geometry, chosen: torch.Tensor) -> RowSet:
        """Return the rows at the columns where `chosen` [B, C] bool is true."""
        most = int(chosen.sum(1).max())
        order = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
        valid = chosen.gather(1, order)
        return cls(geometry, order.masked_fill(~valid, geometry.nowhere), valid)

    @property
    def positions(self) -> torch.Tensor:
        """Rotary positions, [B, R]."""
        return self.geometry.positions.gather(1, self.columns)

    @property
    def units(self) -> torch.Tensor:
        """The number of each row's unit, [B, R]; negative for rows of none."""
        return self.geometry.units_of.gather(1, self.columns)

    @cached_property
    def blocks(self) -> list[tuple[slice, int]]:
        """Slices of rows that attend at a time, and how many columns the last of them can see."""
        ends = torch.where(self.valid, self.columns, -1).amax(0).tolist() if self.columns.numel() else []
        return [
            (slice(at, at + BLOCK), max(1, *(end + 1 for end in ends[at : at + BLOCK])))
            for at in range(0, len(ends), BLOCK)
        ]

    def parts(self, size: int) -> Iterator[tuple[slice, RowSet]]:
        """Yield the rows in order, `size` at a time."""
        for at in range(0, self.columns.shape[1], size):
            part = slice(at, at + size)
            yield part, RowSet(self.geometry, self.columns[:, part], self.valid[:, part])

    def visible(self, part: slice, end: int, window: int | None) -> torch.Tensor:
        """Return which of the first `end` columns the rows of `part` see, bool [1 or B, 1, r, end]."""
        geometry, columns = self.geometry, self.columns[:, part]
        seen = torch.arange(end, device=columns.device) <= columns[:, :, None]
        if geometry.padded:
            seen = seen & geometry.real[:, None, :end]
        if window is not None:
            positions = self.positions[:, part, None]
            seen = seen & (positions - geometry.positions[:, None, :end] < window)
        return seen[:, None]

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of a layer's x [B, H, C, D], as [B, H, R, D]."""
        device = x.device
        if self.geometry.batch == 1:
            return x.index_select(2, self.columns[0].to(device))
        return x.transpose(1, 2)[self.sequences.to(device), self.columns.to(device)].transpose(1, 2)

    def write(self, x: torch.Tensor, fresh: torch.Tensor, where: torch.Tensor | None = None) -> None:
        """Write rows [B, H, R, D] into a layer's x [B, H, C, D]; only those `where` [B, R] is true."""
        columns = self.columns if where is None else self.columns.masked_fill(~where, self.geometry.nowhere)
        rows, columns = self.sequences.to(x.device), columns.to(x.device)
        if self.geometry.batch == 1:
            x.index_copy_(2, columns[0], fresh.to(x.dtype))
            return
        x.transpose(1, 2)[rows, columns] = fresh.transpose(1, 2).to(x.dtype)

    @cached_property
    def sequences(self) -> torch.Tensor:
        """The sequence of each row, [B, 1]: with `columns` it indexes [B, C]."""
        return torch.arange(self.geometry.batch, device=self.columns.device)[:, None]


Patch = Callable[[int, RowSet, Pair, Pair], None]
"""Given (layer, rows, their fresh pair [B, H, R, D], the layer's pair [B, H, C, D]), repairs the latter."""


def overwrite(layer: int, rows: RowSet, fresh: Pair, full: Pair) -> None:
    """The patch that writes fresh rows and corrects nothing."""
    for x, new in zip(full, fresh, strict=True):
        rows.write(x, new)


def leave(layer: int, rows: RowSet, fresh: Pair, full: Pair) -> None:
    """The patch of rows that stand in the sheet already."""


class PeekedError(Exception):
    """Carries the fresh pair of a layer out of a model whose attention is not wanted."""

    def __init__(self, fresh: Pair) -> None:
        super().__init__("only keys and values were wanted")
        self.fresh = fresh


Watcher = Callable[[int, RowSet, Call], None]


class Patched:
    """Stands where a decoder layer expects its cache, for one pass of `rows` through one layer."""

    def __init__(self, sheet: Sheet, rows: RowSet, patch: Patch | None, watch: Watcher | None = None) -> None:
        self.sheet, self.rows, self.patch, self.watch = sheet, rows, patch, watch

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, kwargs: dict[str, Any]
    ) -> Pair:
        """Repair the layer with the rows' keys and values [B, H, R, D]; return all of its rows.

        Without a patch, raise PeekedError.
        """
        fresh = self.sheet.rotary.ordered(keys, values)
        if self.patch is None:
            raise PeekedError(fresh)
        full = self.sheet.layer(layer_idx, fresh)
        self.patch(layer_idx, self.rows, fresh, full)
        kwargs["kvexp"] = self
        return self.sheet.rotary.ordered(*full)

    def attend(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (output [B, Hq, R, Dv], lse or None) of the rows over everything before them."""
        if self.watch is not None:
            self.watch(call.layer_index, self.rows, call)
        window = call.window
        if window is None:
            window = layer_windows(self.sheet.model.config.get_text_config())[call.layer_index]
        outputs, sums, backend = [], [], options_of(self.sheet.model).backend
        for part, end in self.rows.blocks:
            query, key, value = call.query[:, :, part], call.key[:, :, :end], call.value[:, :, :end]
            visible = self.rows.visible(part, end, window).to(query.device)
            if call.needs_lse:
                output, lse = attend(query, key, value, call.scale, visible, backend=backend)
                sums.append(lse)
            else:
                output = attend_without_lse(query, key, value, call.scale, visible, False)
            outputs.append(output)
        return torch.cat(outputs, dim=2), torch.cat(sums, dim=2) if sums else None

    def after(self, call: Call) -> None:
        """Nothing leaves."""
