"""PyramidKV: SnapKV whose first layers hold many rows and whose last layers hold few."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar

from kvexp.errors import UserError
from kvexp.methods.eviction.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """Give layers budgets that fall linearly with depth; within a layer rows are chosen as SnapKV does.

    Source: Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling"
    (2024, arXiv 2406.02069). `beta` is the paper's: of C rows beside the window the last layer holds C / beta
    and the first 2C - C / beta, but no more than there are; the others hold the more. `beta=1` is SnapKV.
    The window, kernel and pool of the repository's scripts are window=8 kernel=7 pool=max.

    The mean over layers is the budget exactly: repositories round each layer on its own. A budget that leaves
    the last layer no row beside its window (C < beta) has no such schedule: every layer then holds the
    budget, as in SnapKV. kvpress goes flat earlier, when the last layer has fewer rows than the window, and
    KVCache-Factory does when the prompt is shorter than 2C. While decoding, the schedule follows the number
    of tokens seen. Layers with a sliding window are not counted.
    """

    id: ClassVar[str] = "pyramidkv"
    by_head: ClassVar[bool] = True
    paper: ClassVar[str] = "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling"
    year: ClassVar[str] = "2024"
    unit: ClassVar[str] = "KV head, layer budgets"

    beta: int = 20

    def __post_init__(self) -> None:
        """Refuse a pyramid that stands on its head."""
        super().__post_init__()
        if self.beta < 1:
            raise UserError(f"method.beta={self.beta} would make deep layers hold most: use 1 (flat) or more")

    def layer_rows(self, layer: int, n_layers: int, rows: int, length: int) -> int:
        """Return how many rows per KV head a layer may keep of `length` tokens; their mean is `rows`."""
        past = rows - self.window
        if length <= rows or past < self.beta:
            return rows
        return self.window + schedule(past, min(length - self.window, 2 * past), n_layers, self.beta)[layer]


@lru_cache(maxsize=1024)
def schedule(past: int, available: int, n_layers: int, beta: int) -> tuple[int, ...]:
    """Return integers that sum to `n_layers * past` and fall linearly from the first layer to the last.

    Args:
        past: rows per layer beside the window, the mean.
        available: rows that there are beside the window, at least `past`.
        n_layers: layers that share.
        beta: the last layer holds past / beta, more where the first cannot hold the rest.
    """
    most = min(Fraction(2 * past) - Fraction(past, beta), Fraction(available))
    step = (2 * most - 2 * past) / max(1, n_layers - 1)
    ideal = [most - layer * step for layer in range(n_layers)] if n_layers > 1 else [Fraction(past)]
    parts = [int(part) for part in ideal]
    by_remainder = sorted(range(n_layers), key=lambda layer: (parts[layer] - ideal[layer], layer))
    for layer in by_remainder[: n_layers * past - sum(parts)]:
        parts[layer] += 1
    return tuple(parts)
