"""How TriAttention divides rows among layers and heads: more where the mean says less about the queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvexp.methods.eviction.selection import share

if TYPE_CHECKING:
    from kvexp.methods.eviction.query_statistics import QueryStatistics
    from kvexp.methods.eviction.triattention import TriAttention
    from kvexp.methods.eviction.view import View


def of_layers(method: TriAttention, memory: QueryStatistics) -> tuple[float, ...]:
    """Return the weight of each layer that evicts, in order."""
    return tuple(memory.unlike(method.budgets, index, 1)[0] for index in sorted(memory.layers))


def among_layers(least: int, weights: Sequence[float], rows: int, length: int) -> list[int]:
    """Return how many rows per KV head each layer may keep of `length` tokens; their mean is `rows`.

    In proportion to `weights`, but `least` and half of `rows` at least.
    """
    layers = len(weights)
    return share(rows * layers, weights, [length] * layers, max(least, rows // 2))


def among_heads(
    method: TriAttention,
    scores: torch.Tensor,
    targets: Sequence[int],
    view: View,
    always: torch.Tensor | None,
) -> list[list[int]]:
    """Return how many rows each head of each sequence keeps; they sum to H times the target.

    In proportion to what the statistics say of the head, but what is always kept and one more at least, and
    at most what the head holds.
    """
    weights = view.memory.unlike(method.head_budgets, view.layer.index, view.heads)
    there = torch.ones_like(scores, dtype=torch.bool) if view.valid is None else view.valid
    pinned = torch.zeros_like(there) if always is None else there & always
    held, fixed = there.sum(-1).tolist(), pinned.sum(-1).amax(-1).tolist()
    smallest = method.smallest_budget()
    return [
        share(view.heads * target, weights, most, min(target, max(smallest, least + 1)))
        for target, most, least in zip(targets, held, fixed, strict=True)
    ]
