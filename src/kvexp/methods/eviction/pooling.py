"""Smoothing of scores along a sequence, as though rows that take no part were not there."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F


def pooled(
    scores: torch.Tensor, among: torch.Tensor, kernel: int, how: Literal["avg", "max"]
) -> torch.Tensor:
    """Return the mean or maximum of each row's score and its neighbours', [B, N, S]; 0 for rows not `among`.

    Neighbours are those of the rows that take part: pads and other rows, wherever they stand, are skipped.
    Beyond both ends stand zeros for `avg` (the sum is always divided by `kernel`) and nothing for `max`.

    Args:
        scores: [B, N, S] of any float type.
        among: [B or 1, N or 1, S] bool, rows that take part.
        kernel: rows that are pooled, an odd number; 1 changes nothing.
        how: what is taken of them.
    """
    rows, outside = scores.shape[-1], 0.0 if how == "avg" else -torch.inf
    place = torch.where(among, among.cumsum(-1) - 1, rows).expand(
        scores.shape
    )  # the others share a last slot
    packed = scores.new_full((*scores.shape[:2], rows + 1), outside).scatter(-1, place, scores)[..., :rows]
    pool = F.avg_pool1d if how == "avg" else F.max_pool1d
    smooth = pool(packed, kernel, stride=1, padding=kernel // 2)
    return smooth.gather(-1, place.clamp(max=rows - 1)).masked_fill(~among, 0.0)
