"""TOVA: at each step the row that the latest query attends to least leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvexp.methods.eviction.base import EvictionMethod

if TYPE_CHECKING:
    from torch import Tensor

    from kvexp.methods.eviction.view import View


@dataclass(frozen=True)
class TOVA(EvictionMethod):
    """Keep the rows that get most attention from the last query, the mean over all heads of the layer.

    Source: Oren et al., "Transformers are Multi-State RNNs" (2024, arXiv 2401.06104). All heads of a layer
    hold the same tokens. Nothing is protected, not even the latest token; `recent=1` pins it, as kvpress
    does. `group=max` takes the largest head instead of the mean over heads.
    """

    id: ClassVar[str] = "tova"
    paper: ClassVar[str] = "Transformers are Multi-State RNNs"
    year: ClassVar[str] = "2024"
    reads: ClassVar[tuple[str, ...]] = ("window queries",)
    unit: ClassVar[str] = "layer"

    interval: int | None = 1

    @property
    def window_size(self) -> int:
        """Only the last query scores."""
        return 1

    def score(self, view: View) -> Tensor:
        """Return the last query's attention, one value for all heads, [B, 1, S]."""
        attention = view.window_probabilities()[:, :, 0]
        return attention.mean(1, True) if self.group == "mean" else attention.amax(1, True)
