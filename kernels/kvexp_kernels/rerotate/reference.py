"""Turn the rotary numbers of rows, in plain torch.

F bands of two numbers each turn together: i and i + F, or 2 i and 2 i + 1 where they are `adjacent`; they are
the first numbers of a row, or the `last`. The others stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Turn:
    """A rotation for each row: cos and sin `[..., F]`, which broadcast over the rows' leading axes."""

    cos: Tensor
    sin: Tensor
    adjacent: bool = False
    last: bool = False

    @property
    def bands(self) -> int:
        """F."""
        return self.cos.shape[-1]

    def pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return views `[..., F]` of the two numbers of each band of `x [..., D]`."""
        at = x.shape[-1] - 2 * self.bands if self.last else 0
        turning = x[..., at : at + 2 * self.bands]
        if self.adjacent:
            return turning[..., ::2], turning[..., 1::2]
        return turning[..., : self.bands], turning[..., self.bands :]

    def of(self, x: Tensor) -> Tensor:
        """Return x turned, in float32 (float64 where x or the angles are)."""
        wide = torch.promote_types(torch.promote_types(x.dtype, self.cos.dtype), torch.float32)
        out = x.to(wide, copy=True)
        (left, right), (new_left, new_right) = self.pairs(x.to(wide)), self.pairs(out)
        new_left.copy_(left * self.cos - right * self.sin)
        new_right.copy_(right * self.cos + left * self.sin)
        return out


def rerotate(x: Tensor, turn: Turn, out: Tensor | None = None) -> Tensor:
    """Return rows `x [B, H, T, D]` turned by `turn`, in the dtype of x; written into `out`, which may be x.

    Computed in float32 (float64 where x or the angles are).
    """
    turned = turn.of(x).to(x.dtype)
    return turned if out is None else out.copy_(turned)
