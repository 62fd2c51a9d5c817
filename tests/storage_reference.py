"""What a quantised cache holds of one sequence, the slow way: head by head, block by block, with lists."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvexp.cache.scheme import Scheme


class Held(NamedTuple):
    """Keys and values [H, n, D] as attention has to see them; which rows of each head are outliers."""

    keys: torch.Tensor
    values: torch.Tensor
    outliers: list[set[int]]


def held(keys: torch.Tensor, values: torch.Tensor, scheme: Scheme) -> Held:
    """What is held of rows keys/values [H, n, D], of which none is a pad."""
    heads, rows = keys.shape[:2]
    if scheme.blockwise:
        whole = max(0, rows - scheme.residual) // scheme.group * scheme.group
        packed_keys = packed_values = whole
    else:
        packed_keys = rows // scheme.residual * scheme.residual
        packed_values = max(0, rows - scheme.residual)
    seen_keys, seen_values, outliers = keys.clone(), values.clone(), []
    for h in range(heads):
        smooth, kept = smoothed(keys[h], values[h], packed_keys, scheme)
        outliers.append(kept)
        for start in range(0, packed_keys, scheme.group):
            rows_of_group = slice(start, start + scheme.group)
            seen_keys[h, rows_of_group] = back(smooth[0][rows_of_group], scheme.bits, 0)
        for start in range(0, values.shape[-1], scheme.group):
            part = slice(0, packed_values), slice(start, start + scheme.group)
            seen_values[h][part] = back(smooth[1][part], scheme.bits, 1)
        for row in kept:
            seen_keys[h, row], seen_values[h, row] = keys[h, row], values[h, row]
    return Held(seen_keys, seen_values, outliers)


def back(x: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Numbers of which those along `dim` share a scale and a minimum, as they come back."""
    if not x.numel():
        return x
    low = x.float().amin(dim, keepdim=True).half().float()
    step = ((x.float().amax(dim, keepdim=True) - low).clamp(min=0) / (2**bits - 1)).half().float()
    codes = ((x.float() - low) / torch.where(step > 0, step, 1.0)).clamp(0, 2**bits - 1).round()
    return (codes * step + low).to(x.dtype)


def smoothed(
    keys: torch.Tensor, values: torch.Tensor, packed: int, scheme: Scheme
) -> tuple[tuple[torch.Tensor, torch.Tensor], set[int]]:
    """Rows that are packed in place of those of one head [n, D], and the outliers, block after block."""
    smooth, active, replaced = (keys.clone(), values.clone()), [], set[int]()
    if not scheme.outliers:
        return smooth, set()
    sizes = keys.float().abs().sum(-1).tolist()
    for start in range(0, packed, scheme.group):
        block = list(range(start, start + scheme.group))
        best = sorted(active + block, key=lambda row: (sizes[row], row))[: scheme.outliers]
        pushed = [row for row in active if row not in best]
        if len(replaced) + len(pushed) > scheme.pool:
            continue
        replaced |= set(pushed)
        active = sorted(best)
        taken = [row for row in block if row in best]
        others = [row for row in block if row not in best]
        for x in smooth:
            x[taken] = x[others].float().mean(0).to(x.dtype)
    return smooth, replaced | set(active)
