"""Make scores of different heads comparable, and let several kinds of score decide together."""

from __future__ import annotations

import torch

CLAMP = 1e-6  # the least standard deviation that is divided by


def z_scores(scores: torch.Tensor, among: torch.Tensor | None) -> torch.Tensor:
    """Return (score - mean) / standard deviation along the rows, [B, N, S]; 0 for rows not `among`.

    Mean and (population) deviation are over the rows that are `among` [B or 1, N or 1, S] bool, None for all.
    """
    if among is None:
        gap = scores - scores.mean(-1, keepdim=True)
        return gap / gap.square().mean(-1, keepdim=True).sqrt().clamp(min=CLAMP)
    count = among.sum(-1, keepdim=True).clamp(min=1)
    counted = scores.masked_fill(~among, 0.0)
    gap = (scores - counted.sum(-1, keepdim=True) / count).masked_fill(~among, 0.0)
    deviation = (gap.square().sum(-1, keepdim=True) / count).sqrt()
    return gap / deviation.clamp(min=CLAMP)


def attention_per_query(probabilities: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return the mean attention [B, N, S] of each row over the queries that could see it.

    probabilities [B, N, w, S], and `visible` alike: which queries count and could see which row. A plain sum
    would favour early rows.
    """
    count = visible.sum(2).clamp(min=1)
    return (probabilities * visible).sum(2) / count
