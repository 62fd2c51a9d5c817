"""An eviction method that has none of the family's knobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvexp.methods.eviction.base import EvictionMethod


@dataclass(frozen=True)
class Bare(EvictionMethod):
    """Base of methods for which sinks, intervals and the rest would mean nothing: a run then refuses them."""

    prefill: ClassVar[Literal["end", "chunks", "off"]] = "end"  # type: ignore[misc]
    query_aware: ClassVar[bool] = False  # type: ignore[misc]
    interval: ClassVar[int | None] = None  # type: ignore[misc]
    trigger: ClassVar[Literal["slack", "length"]] = "slack"  # type: ignore[misc]
    smooth: ClassVar[bool] = False  # type: ignore[misc]
    sinks: ClassVar[int] = 0  # type: ignore[misc]
    recent: ClassVar[int] = 0  # type: ignore[misc]
    protect_prompt: ClassVar[bool] = False  # type: ignore[misc]
    group: ClassVar[Literal["mean", "max"]] = "mean"  # type: ignore[misc]
