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
    geometry = rows.geometry
    part = slice(min(unit.start for unit in geometry.units), geometry.width)
    units = geometry.units_of[:, part].to(x.device)
    mean = torch.cat([mean.to(x.device), mean.new_zeros(1, *mean.shape[1:]).to(x.device)])
    of_column = torch.where(units < 0, len(mean) - 1, units)  # the last mean is zero
    shift = mean.transpose(0, 1)[:, of_column].transpose(0, 1)  # [B, H, c, D]
    if angles is not None:
        shift = angles.at(slice(None), part).unsqueeze(1).turn(shift)
    if weights is not None:
        weights = weights[..., part].to(x.device)
        shift = shift * (weights[:, None] if weights.dim() == 2 else weights)[..., None]
    if x.dtype == shift.dtype:
        x[:, :, part] += shift
    else:
        x[:, :, part] = (wide(x[:, :, part]) + shift).to(x.dtype)
