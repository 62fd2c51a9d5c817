"""From scores to kept rows: the same for every method.

Larger scores are kept, ties go to the lower index, kept rows come out in the order in which they stand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def choose(
    scores: torch.Tensor,
    rows: Sequence[Sequence[int]],
    valid: torch.Tensor | None = None,
    always: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (indices [B, H, n] ascending, which of them count [B, H, n] or None when all do).

    Args:
        scores: [B, H, S] float32 (float64 for float64 models), larger is kept.
        rows: how many rows to keep, `rows[b][h]`; n is the largest of them.
        valid: [B, H, S], rows that exist (None: all); the others are never kept.
        always: [B, H, S], rows that are kept before any other, whatever their score.
    """
    if always is not None:
        scores = scores.masked_fill(always, torch.inf)
    if valid is not None:
        scores = scores.masked_fill(~valid, -torch.inf)
    most = min(max(max(of_heads) for of_heads in rows), scores.shape[-1])
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., :most]  # stable: ties to the lower index
    counts = torch.tensor([list(of_heads) for of_heads in rows], device=scores.device)
    chosen = torch.arange(most, device=scores.device) < counts[..., None]
    if valid is not None:
        chosen = chosen & valid.gather(-1, best)
    ordered = best.masked_fill(~chosen, -1).sort(dim=-1).values  # what does not count comes first
    counted = ordered >= 0
    return ordered.clamp(min=0), None if bool(counted.all()) else counted


def over_group(scores: torch.Tensor, heads: int, how: str) -> torch.Tensor:
    """Return scores [B, heads, S] of KV heads from those of query heads [B, Hq, S], by `mean` or `max`."""
    if scores.shape[1] == heads:
        return scores
    grouped = scores.unflatten(1, (heads, scores.shape[1] // heads))
    return grouped.mean(2) if how == "mean" else grouped.amax(2)


def share(total: int, weights: Sequence[float], most: Sequence[int], least: int = 0) -> list[int]:
    """Return integers that sum to `total` (or to all there is), in proportion to `weights`.

    Part i is at least `least` and at most `most[i]`; what a full part cannot take goes to the others, the
    rounding to the largest remainders, ties to the lower index.
    """
    floor = [min(least, top) for top in most]
    parts, left = list(floor), max(0, min(total, sum(most)) - sum(floor))
    while left:
        open_parts = [i for i, top in enumerate(most) if parts[i] < top]
        mass = sum(max(weights[i], 0.0) for i in open_parts)
        ideal = {
            i: left * max(weights[i], 0.0) / mass if mass else left / len(open_parts) for i in open_parts
        }
        room = {i: most[i] - parts[i] for i in open_parts}
        given = {i: min(int(ideal[i]), room[i]) for i in open_parts}
        if all(
            ideal[i] <= room[i] for i in open_parts
        ):  # nobody is full: the largest remainders take the rest
            by_remainder = sorted(open_parts, key=lambda i: (round(given[i] - ideal[i], 9), i))
            for i in by_remainder[: left - sum(given.values())]:
                given[i] += given[i] < room[i]
        for i, more in given.items():
            parts[i] += more
            left -= more
    return parts
