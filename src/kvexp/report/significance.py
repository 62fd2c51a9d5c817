"""What may be said of many differences at once: Holm's correction, and a verdict at a stated level.

Source: Holm, "A Simple Sequentially Rejective Multiple Test Procedure", Scandinavian Journal of Statistics,
1979. It holds the probability of any false claim among the comparisons to the level, whatever depends on
what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

LEVEL = 0.05
Verdict = Literal["better", "worse", "not shown"]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the adjusted p of each comparison: at most the level where it may be claimed among all."""
    adjusted = [0.0] * len(p_values)
    running = 0.0
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    for rank, place in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = running
    return adjusted


def verdict(difference: float, low: float, high: float, adjusted: float, higher_is_better: bool) -> Verdict:
    """Return what may be claimed: a difference, only where both the test and the interval show one.

    `adjusted` is the p of `holm`; `low` and `high` bound the interval of the difference.
    """
    if adjusted >= LEVEL or low <= 0 <= high:
        return "not shown"
    return "better" if (difference > 0) == higher_is_better else "worse"
