"""AgentKVShift's correction of a layer, in plain torch: move reused rows, and add their unit's shift.

Source: "AgentKVShift" (2026, arXiv 2607.21604): what the probes of a unit moved on average is added to the
rest of it, each token by its own weight. Here a row may at the same time be turned from the position it was
made at to the one it has now, and the shift of keys from no position to that of the row, so that a layer's
rows are read once and written once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp_kernels.rerotate.reference import Turn


@dataclass(frozen=True)
class Shift:
    """What is added to rows `[B, H, C, D]`.

    mean `[U, H, D]` of each unit; units `[B, C]` integers: the unit of each row, below 0 where a row is of
    none and gets nothing; weights `[B, C]` or `[B, H, C]`, how much of the shift a row gets (None: all);
    turn: the rotation that takes the mean to the position of each row (None: it is added as it is).
    """

    mean: Tensor
    units: Tensor
    weights: Tensor | None = None
    turn: Turn | None = None

    def tensors(self) -> list[Tensor | None]:
        """Every tensor held."""
        turn = [] if self.turn is None else [self.turn.cos, self.turn.sin]
        return [self.mean, self.units, self.weights, *turn]


def shift_correct(x: Tensor, shift: Shift, move: Turn | None = None, out: Tensor | None = None) -> Tensor:
    """Return rows `x [B, H, C, D]`, turned by `move` if given, plus their unit's shift, in the dtype of x.

    Written into `out`, which may be x. Computed in float32 (float64 where an input is) and rounded once.
    """
    rows = x.to(torch.promote_types(x.dtype, torch.float32)) if move is None else move.of(x)
    mean = torch.cat([shift.mean, shift.mean.new_zeros(1, *shift.mean.shape[1:])])  # the last is zero
    unit = shift.units.long().masked_fill(shift.units < 0, len(mean) - 1)
    added = mean[unit].transpose(1, 2)  # [B, H, C, D]
    added = added.to(torch.promote_types(added.dtype, rows.dtype))
    if shift.turn is not None:
        added = shift.turn.of(added)
    if shift.weights is not None:
        weights = shift.weights if shift.weights.dim() == 3 else shift.weights[:, None]
        added = added * weights[..., None]
    corrected = (rows + added).to(x.dtype)
    return corrected if out is None else out.copy_(corrected)
