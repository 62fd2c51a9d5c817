"""The shared shift of a unit: the mean of its probes' residuals, put onto every other row of the unit.

Residuals are fresh minus reused rows. Those of keys may be averaged before rotation: each is turned back by
its own position, and the mean is turned to the position of each row that it corrects.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvexp.attention.rerotate import Angles
from kvexp.methods.reuse.patched import RowSet
from kvexp.methods.reuse.probes import wide
from kvexp_kernels.backend import fused
from kvexp_kernels.shift_correct import Shift, shift_correct


@dataclass(frozen=True)
class Mean:
    """Means [U, H, D] of the residuals of U units, how many probes each has [U], and how sure they are.

    `spread` [U, H]: the squared standard error of the mean, summed over its D numbers; infinite where a unit
    has fewer than two probes.
    """

    mean: torch.Tensor
    counts: torch.Tensor
    spread: torch.Tensor

    def shrunk(self) -> torch.Tensor:
        """Return the means times max(0, 1 - spread / |mean|^2), the positive-part James-Stein factor."""
        square = self.mean.square().sum(-1)  # [U, H]
        factor = (1 - self.spread / square).clamp(min=0)
        return self.mean * factor.nan_to_num(0.0)[..., None]  # 0 / 0: nothing moved, nothing to add


def mean_of(
    rows: RowSet, residuals: torch.Tensor, probes: torch.Tensor, angles: Angles | None = None
) -> Mean:
    """Return each unit's mean of residuals [B, H, R, D] over its probes [B, R] bool.

    With `angles` [B, R, F] residuals are turned back to no position before they are averaged.
    """
    if angles is not None:
        residuals = angles.unsqueeze(1).back(residuals)
    units = len(rows.geometry.units)
    device = residuals.device
    flat = residuals.transpose(1, 2).flatten(0, 1)  # [B * R, H, D]
    use = (probes & rows.valid & (rows.units >= 0)).flatten().to(device)
    of = rows.units.flatten().to(device)[use]
    flat = flat[use]
    counts = torch.bincount(of, minlength=units).to(flat)
    least = counts.clamp(min=1)[:, None, None]
    mean = flat.new_zeros(units, *flat.shape[1:]).index_add_(0, of, flat) / least
    errors = (flat - mean[of]).square().sum(-1)
    squares = flat.new_zeros(units, flat.shape[1]).index_add_(0, of, errors)
    spread = squares / ((counts - 1) * counts).clamp(min=1)[:, None]
    return Mean(mean, counts, spread.masked_fill(counts[:, None] < 2, torch.inf))


@dataclass(frozen=True)
class Places:
    """Where the means of units are added, and times what: the same in all layers that rotate alike.

    units [B * c]: the number of each column's unit, one more than the last where there is none. `straight`
    and `across` [B, 1 or H, c, D] scale the mean, and the mean turned by a quarter; None: by 1, and not at
    all.
    """

    columns: slice
    units: torch.Tensor
    straight: torch.Tensor | None = None
    across: torch.Tensor | None = None
    angles: Angles | None = None
    weights: torch.Tensor | None = None  # [B, 1 or H, c, 1] of the mean, which the other two contain

    @classmethod
    def of(cls, rows: RowSet, x: torch.Tensor, weights: torch.Tensor | None, angles: Angles | None) -> Places:
        """Return the places in a layer like x [B, H, C, D]; see `add`."""
        geometry, device = rows.geometry, x.device
        columns = slice(min(unit.start for unit in geometry.units), geometry.width)
        units = geometry.units_of[:, columns].flatten().to(device)
        units = torch.where(units < 0, len(geometry.units), units)
        straight, across = None, None
        if angles is not None:
            angles = angles.at(slice(None), columns).unsqueeze(1)
            straight, across = (y.to(device) for y in angles.whole(x.shape[-1]))
        if weights is not None:
            weights = weights[..., columns].to(device)
            weights = (weights[:, None] if weights.dim() == 2 else weights)[..., None]
            # Of full width, so that columns and the numbers of a row are one long axis.
            straight = weights.repeat_interleave(x.shape[-1], -1) if straight is None else straight * weights
            across = None if across is None else across * weights
        return cls(columns, units, straight, across, angles, weights)

    def add(self, x: torch.Tensor, mean: torch.Tensor) -> None:
        """Add means [U, H, D] to the rows of their units in x [B, H, C, D], in float32 at least."""
        view = x[:, :, self.columns]
        if fused(x, mean):
            shift_correct(view, self.kernel_shift(view, mean), out=view)
            return
        total, mean = wide(view), mean.to(x.device)
        if self.straight is None:
            total += self._of_columns(mean, len(x))
        else:
            total.addcmul_(self._of_columns(mean, len(x)), self.straight)
        if self.across is not None and self.angles is not None:
            total.addcmul_(self._of_columns(self.angles.quarter(mean), len(x)), self.across)
        if total is not view:
            view.copy_(total)

    def kernel_shift(self, view: torch.Tensor, mean: torch.Tensor) -> Shift:
        """Return what is added to rows `view` [B, H, c, D] as the kernel takes it."""
        units = self.units.view(len(view), -1)
        units = units.masked_fill(units == len(mean), -1)
        weights = None if self.weights is None else self.weights[..., 0].expand(view.shape[:3])
        return Shift(mean, units, weights, None if self.angles is None else self.angles.kernel_turn())

    def _of_columns(self, mean: torch.Tensor, batch: int) -> torch.Tensor:
        """The mean of each column's unit, zero where there is none, [B, H, c, D]."""
        by_head = torch.cat([mean, mean.new_zeros(1, *mean.shape[1:])]).transpose(0, 1).contiguous()
        return by_head.index_select(1, self.units).unflatten(1, (batch, -1)).transpose(0, 1)


def add(
    x: torch.Tensor,
    rows: RowSet,
    mean: torch.Tensor,
    weights: torch.Tensor | None = None,
    angles: Angles | None = None,
) -> None:
    """Add to the rows of units in x [B, H, C, D] the mean [U, H, D] of their unit, in float32.

    `weights` [B, C] or [B, H, C] scale what each row gets; `angles` [B, C, F] turn it to the row's position.
    """
    Places.of(rows, x, weights, angles).add(x, mean)
