"""Attention to the whole context: what every other method is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvexp.methods.base import Method


@dataclass(frozen=True)
class Full(Method):
    """Keep every row. The budget is ignored."""

    id: ClassVar[str] = "full"
    family: ClassVar[str] = "baseline"
    by_head: ClassVar[bool] = True
    uses_budget: ClassVar[bool] = False
