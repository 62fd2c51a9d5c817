"""A unit of text in few bits, for a store of reusable chunks: all of its rows are packed, none is left over.

A cache keeps its newest rows in full, and most rows of a short unit would be among them; a store holds many
units, and packs each whole, its last group a shorter one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from kvexp.cache.outliers import Outliers, no_outliers
from kvexp.cache.packing import Packed, quantise
from kvexp.cache.scheme import Scheme


@dataclass(frozen=True)
class QuantisedUnit:
    """Keys and values [B, H, n, D] of a unit's n rows in one layer, and its outliers in full, if any."""

    keys: Packed
    values: Packed
    outliers: Outliers | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of everything that has to be held or written."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def restored(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [B, H, n, D] as they come back; outliers are exact in their own dtype."""
        keys, values = self.keys.dequantise(dtype), self.values.dequantise(dtype)
        if self.outliers is None:
            return keys, values
        return (
            _placed(keys, self.outliers.rows, self.outliers.keys),
            _placed(values, self.outliers.rows, self.outliers.values),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, as a file holds them."""
        found: dict[str, torch.Tensor] = {}
        for name, packed in (("keys", self.keys), ("values", self.values)):
            parts = zip(("codes", "scale", "minimum"), packed.tensors(), strict=True)
            found |= {f"{name}.{part}": tensor for part, tensor in parts}
        if self.outliers is not None:
            found |= {
                "outliers.keys": self.outliers.keys,
                "outliers.values": self.outliers.values,
                "outliers.rows": self.outliers.rows,
            }
        return found

    @classmethod
    def of_tensors(
        cls, tensors: Mapping[str, torch.Tensor], scheme: Scheme, widths: tuple[int, int]
    ) -> QuantisedUnit:
        """Return the unit that `tensors` and its scheme were; `widths` are the D of keys and of values."""

        def packed(name: str, dim: int, width: int) -> Packed:
            codes, scale, minimum = (tensors[f"{name}.{part}"] for part in ("codes", "scale", "minimum"))
            return Packed(codes, scale, minimum, scheme.bits, scheme.group, dim, width)

        outliers = None
        if "outliers.rows" in tensors:
            rows = tensors["outliers.rows"]
            kept = (tensors["outliers.keys"], tensors["outliers.values"])
            outliers = Outliers(*kept, rows, torch.zeros_like(rows, dtype=torch.bool))
        return cls(packed("keys", -2, widths[0]), packed("values", -1, widths[1]), outliers)


def quantised(keys: torch.Tensor, values: torch.Tensor, scheme: Scheme) -> QuantisedUnit:
    """Pack all rows of a unit, [B, H, n, D] and n at least 1; `residual` of the scheme counts for nothing.

    Groups are counted from the unit's first row. Outliers are sought block by block; the last one, which may
    be shorter, is searched where it has more rows than outliers are wanted. Packed keys can be rotated only
    after `restored`: give keys as they are to come back.
    """
    outliers = None
    if scheme.outliers:
        outliers, keys, values = _apart(keys, values, scheme)
    return QuantisedUnit(
        quantise(keys, scheme.bits, scheme.group, -2),
        quantise(values, scheme.bits, scheme.group, -1),
        outliers,
    )


def _apart(
    keys: torch.Tensor, values: torch.Tensor, scheme: Scheme
) -> tuple[Outliers, torch.Tensor, torch.Tensor]:
    """Return the outliers, and the rows that are packed with others in their place."""
    held, blocks = no_outliers(keys, values), []
    for at in range(0, keys.shape[2], scheme.group):
        span = slice(at, at + scheme.group)
        block = keys[:, :, span], values[:, :, span]
        if block[0].shape[2] > scheme.outliers:
            held, *smooth = held.exchange(*block, at, scheme.outliers, scheme.pool)
            block = smooth[0], smooth[1]
        blocks.append(block)
    smooth_keys, smooth_values = (torch.cat(parts, dim=2) for parts in zip(*blocks, strict=True))
    return replace(held, active=torch.zeros_like(held.active)), smooth_keys, smooth_values


def _placed(x: torch.Tensor, rows: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return rows `x` [B, H, n, D] with those that were kept [B, H, P, D] where they belong (-1: nowhere)."""
    n = x.shape[2]
    room = torch.cat([x, x[:, :, :1]], dim=2)  # one place more, for no row
    where = rows.long().masked_fill(rows < 0, n)[..., None].expand(*rows.shape, x.shape[-1])
    return room.scatter(2, where, kept.to(x.dtype))[:, :, :n]
