"""TriAttention with the settings that kept most of full attention in this project's own measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvexp.methods.eviction.triattention import TriAttention


@dataclass(frozen=True)
class TriAttentionPlus(TriAttention):
    """Choose per layer and KV head, always keep the first 4 and the latest 128 rows, weigh by the variance.

    The same method with other defaults: text of any kind loses most where recent rows leave, and the variance
    of the logit serves better than S_norm in place of which it stands. The prompt competes.
    """

    id: ClassVar[str] = "triattention_plus"
    unit: ClassVar[str] = "KV head"

    sinks: int = 4
    recent: int = 128
    protect_prompt: bool = False
    mode: Literal["per_head", "per_layer_perhead", "union"] = "per_layer_perhead"
    norm: Literal["weighted", "unweighted", "none", "variance"] = "variance"
