"""How a cache stores its rows in few bits: which rows are packed when, and how. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scheme:
    """How the rows of one layer are stored; the `residual` R newest ones stay in the model's dtype.

    `bits` of a code; `group` numbers share a scale and a minimum.
    Keys are packed in groups of rows of a channel, values in groups of channels of a row. Not `blockwise`
    (KIVI): keys are packed R at a time, so that the newest n mod R are left, and each value when R newer ones
    have come. `blockwise` (OTT): keys and values of `group` rows together, once R newer ones have come.
    `outliers`: rows of a KV head that each such block is searched for; `pool`: how many more a head may keep
    that later ones have replaced.
    """

    bits: int
    group: int
    residual: int
    blockwise: bool = False
    outliers: int = 0
    pool: int = 0

    def __post_init__(self) -> None:
        """Refuse a layout in which groups of keys would be cut, and outliers that are sought nowhere."""
        if not self.blockwise and (self.residual < 1 or self.residual % self.group):
            raise ValueError(f"{self.residual} rows at a time are no whole groups of {self.group}")
        if self.outliers and not (self.blockwise and self.outliers < self.group):
            raise ValueError(f"{self.outliers} outliers are sought in blocks of more rows than that")

    def packed(self, rows: int) -> tuple[int, int]:
        """Return how many of the first keys, and of the first values, are packed when `rows` have come."""
        if self.blockwise:
            whole = max(0, rows - self.residual) // self.group * self.group
            return whole, whole
        return rows - rows % self.residual, max(0, rows - self.residual)
