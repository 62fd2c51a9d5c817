"""Rows of sequences that advance together: the older ones packed, the newer ones as they came, no pads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvexp.attention.function import Call
from kvexp.cache.outliers import Outliers, no_outliers
from kvexp.cache.packed_rows import PackedPair
from kvexp.cache.packing import Column, Packed, quantise
from kvexp.cache.rows import expanded, over_heads
from kvexp.cache.scheme import Scheme


@dataclass(frozen=True)
class Local:
    """What attention over rows in full needs: `visible` [B, Hq or 1, T, S] or None, `causal` a triangle."""

    key: torch.Tensor
    value: torch.Tensor
    visible: torch.Tensor | None
    causal: bool


class Lane:
    """n rows, of which sources hold the first `past`, in whole groups.

    Then come `keys`, `values` (packed) and `dense_keys`, `dense_values` [B, H, rows, D]: a row's key may be
    packed while its value is not. The rows between are unpacked for attention, so that it has two parts: rows
    of which both are packed, and the rest.
    """

    def __init__(self, scheme: Scheme, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.scheme, self.past = scheme, 0
        self.keys, self.values = Column(), Column()
        self.dense_keys, self.dense_values = keys, values
        self.outliers: Outliers | None = None

    @property
    def batch(self) -> int:
        """Sequences that the lane tells apart."""
        return self.dense_keys.shape[0]

    @property
    def rows(self) -> int:
        """n."""
        return self.past + self.keys.rows + self.dense_keys.shape[2]

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put rows [B, H, T, D] at the end."""
        self.dense_keys = torch.cat([self.dense_keys, keys], dim=2)
        self.dense_values = torch.cat([self.dense_values, values], dim=2)

    def settle(self) -> int:
        """Pack what is due; return how many rows are packed now, key and value, that were not before."""
        keys, values = self.scheme.packed(self.rows)
        due_keys, due_values = keys - self.past - self.keys.rows, values - self.past - self.values.rows
        if not (due_keys or due_values):
            return 0
        first = self.past + self.keys.rows
        old_keys, self.dense_keys = _cut(self.dense_keys, due_keys)
        old_values, self.dense_values = _cut(self.dense_values, due_values)
        if self.scheme.outliers and due_keys:
            old_keys, old_values = self._without_outliers(old_keys, old_values, first)
        bits, group = self.scheme.bits, self.scheme.group
        if due_keys:
            self.keys.append(quantise(old_keys, bits, group, -2))
        if due_values:
            self.values.append(quantise(old_values, bits, group, -1))
        return due_values

    def _without_outliers(
        self, keys: torch.Tensor, values: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows that are packed in place of these, block by block; the outliers are kept."""
        scheme, blocks = self.scheme, []
        held = self.outliers or no_outliers(keys, values)
        for at in range(0, keys.shape[2], scheme.group):
            span = slice(at, at + scheme.group)
            block = keys[:, :, span], values[:, :, span]
            held, *smooth = held.exchange(*block, first + at, scheme.outliers, scheme.pool)
            blocks.append(smooth)
        self.outliers = held
        return torch.cat([k for k, _ in blocks], dim=2), torch.cat([v for _, v in blocks], dim=2)

    def pair(self) -> PackedPair | None:
        """Return the rows of which both key and value are packed, None where there is none."""
        if self.keys.packed is None or self.values.packed is None or not self.values.rows:
            return None
        return PackedPair(self.keys.packed, self.values.packed, self._hidden(self.values.rows))

    def _hidden(self, rows: int) -> torch.Tensor | None:
        return None if self.outliers is None else self.outliers.hidden(self.past, self.past + rows)

    def release(self) -> PackedPair | None:
        """Give the finished rows away, whole groups of them, to stand in a source from now on."""
        whole = self.values.rows // self.scheme.group * self.scheme.group
        if not whole:
            return None
        assert self.keys.packed is not None and self.values.packed is not None
        keys, values = self.keys.packed, self.values.packed
        pair = PackedPair(keys.part(0, whole), values.part(0, whole), self._hidden(whole))
        self.keys, self.values = Column(_rest(keys, whole)), Column(_rest(values, whole))
        self.past += whole
        return pair

    def local(self, call: Call, columns: torch.Tensor | None) -> Local:
        """Return the rows that are not packed, and which of them each of the call's T queries sees.

        `columns` [m]: at which of the queries the m latest rows came, None: one at each.
        """
        heads, length = call.query.shape[1:3]
        keys, values = [self.dense_keys], [self.dense_values]
        if self.keys.packed is not None and self.keys.rows > self.values.rows:
            keys.insert(0, self.keys.packed.dequantise(self.dense_keys.dtype, start=self.values.rows))
        rows = self.dense_values.shape[2]
        causal = self.outliers is None and columns is None and length == rows > 1
        visible = None if causal or (length == 1 and columns is None) else self._seen(length, rows, columns)
        if self.outliers is not None:
            keys.insert(0, self.outliers.keys)
            values.insert(0, self.outliers.values)
            visible = self._with_outliers(visible, heads, length, rows)
        key, value = expanded(call.module, torch.cat(keys, dim=2), torch.cat(values, dim=2))
        return Local(key, value, visible, causal)

    def _seen(self, length: int, rows: int, columns: torch.Tensor | None) -> torch.Tensor:
        """Return which rows in full each query sees, [1, 1, T, rows]: all but the latest that come later."""
        device = self.dense_keys.device
        queries = torch.arange(length, device=device)
        came = queries if columns is None else columns
        before = torch.full((rows - len(came),), -1, device=device)
        return (torch.cat([before, came])[None, :] <= queries[:, None])[None, None]

    def _with_outliers(
        self, visible: torch.Tensor | None, heads: int, length: int, rows: int
    ) -> torch.Tensor:
        """Return the mask with the outliers in front: they differ in number from head to head."""
        assert self.outliers is not None
        held = over_heads(self.outliers.rows >= 0, heads)[:, :, None].expand(-1, -1, length, -1)
        if visible is None:
            visible = held.new_ones(1, 1, length, rows)
        return torch.cat([held, visible.expand(*held.shape[:2], -1, -1)], dim=-1)

    def each(self, function: Any) -> Lane:
        """Return a lane of its own, made by applying `function` to every tensor."""
        twin = Lane(self.scheme, function(self.dense_keys), function(self.dense_values))
        twin.past = self.past
        for name in ("keys", "values"):
            packed: Packed | None = getattr(self, name).packed
            setattr(twin, name, Column(None if packed is None else packed.each(function)))
        twin.outliers = None if self.outliers is None else self.outliers.each(function)
        return twin

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor held."""
        found = [self.dense_keys, self.dense_values]
        for column in (self.keys, self.values):
            found += [] if column.packed is None else column.packed.tensors()
        return found if self.outliers is None else [*found, *self.outliers.tensors()]


def _cut(x: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first `rows`, and a copy of the others, so that the whole is not kept alive by them."""
    return x[:, :, :rows], x[:, :, rows:].clone()


def _rest(packed: Packed, start: int) -> Packed | None:
    return packed.part(start, packed.rows) if start < packed.rows else None
