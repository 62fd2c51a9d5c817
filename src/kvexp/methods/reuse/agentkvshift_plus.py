"""AgentKVShift with the settings that came closest to full recompute in this project's own measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvexp.methods.reuse.agentkvshift import AgentKVShift


@dataclass(frozen=True)
class AgentKVShiftPlus(AgentKVShift):
    """Probe what the question reads, shift by shrunk means, keep the first two tokens of a unit fresh.

    The same method with other defaults. Divergence picks the tokens whose residuals are least like the rest,
    a unit's first token above all; what the question reads is as good a sensor as a random token, and fresh
    where it matters. One set of probes serves keys and values, so that fewer tokens are recomputed, and no
    token but these has to run to the check layer. Shifts are unweighted, shrunk by their standard error and
    by how little the unit drifted.
    """

    id: ClassVar[str] = "agentkvshift_plus"

    probes: Literal["divergence", "random", "query"] = "query"
    sets: Literal["separate", "shared"] = "shared"
    union_fresh: bool = True
    weights: Literal["clipped", "none"] = "none"
    shrink: Literal["none", "james_stein"] = "james_stein"
    first: int = 2
    drift: float | None = 0.9
