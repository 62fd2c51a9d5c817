"""Reposition: place stored rows and repair nothing, the floor of every comparison of reuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvexp.methods.reuse.base import PlacedMethod


@dataclass(frozen=True)
class Reposition(PlacedMethod):
    """Reuse every unit as it was stored; keys move to their new positions exactly, nothing is recomputed.

    Each unit then knows nothing of the units before it. From no paper.
    """

    id: ClassVar[str] = "reposition"
    exact: ClassVar[bool] = False
    expects: ClassVar[tuple[str, ...]] = ("reused",)
