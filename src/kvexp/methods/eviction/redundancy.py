"""How much of a row others say too: cosine similarity of keys, without a matrix of all pairs in memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F

PAIRS = 1 << 23  # similarities that stand in memory at once


def redundancy(keys: torch.Tensor, valid: torch.Tensor | None, threshold: float) -> torch.Tensor:
    """Return the mean similarity of every row to the others, [B, H, S] float32 at least.

    Of the rows that are more than `threshold` similar to row i, the last keeps its similarity to i out of
    its own mean, so that the newest of near duplicates does not count as redundant. Rows that do not count
    get 0 and give nothing.

    Args:
        keys: [B, H, S, D].
        valid: [B, H, S], rows that count; None: all.
        threshold: a cosine.
    """
    batch, heads, length, _ = keys.shape
    unit = F.normalize(keys if keys.dtype == torch.float64 else keys.float(), dim=-1)
    if valid is not None:
        unit = unit * valid[..., None]
    numbers = torch.arange(length, device=keys.device)
    total = unit.new_zeros(batch, heads, length)
    block = max(1, PAIRS // max(1, batch * heads * length))
    for at in range(0, length, block):
        own = numbers[at : at + block, None]
        similar = (unit[:, :, at : at + block] @ unit.mT).masked_fill(own == numbers, 0.0)
        above = similar > threshold
        last = length - 1 - above.flip(-1).to(torch.uint8).argmax(-1, keepdim=True)  # the first of equals
        spared = (numbers == last) & above.any(-1, keepdim=True)
        total += similar.masked_fill(spared, 0.0).sum(2)
    count = length if valid is None else valid.sum(-1, keepdim=True).clamp(min=1)
    return total / count
