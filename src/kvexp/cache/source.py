"""What a cache layer may stand on besides its own rows, and who may watch it attend."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from kvexp.attention.function import Call

if TYPE_CHECKING:
    from kvexp.cache.dense import DenseLayer

State = tuple[torch.Tensor, torch.Tensor]  # (a [B, Hq, T, Dv], lse [B, Hq, T])


class Source(Protocol):
    """Attention states over something that is no longer (or not only) this layer's own rows."""

    entries: int
    batch: int  # sequences that it tells apart; 1 serves any batch

    def state(self, call: Call, layer: DenseLayer) -> State:
        """Return (a [B, Hq, T, Dv], lse [B, Hq, T]) for the queries of `call`."""
        ...

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors held, for counting bytes."""
        ...

    def select(self, index: torch.Tensor) -> Source:
        """Return the source of the sequences `index`, itself where it serves any."""
        ...


Observer = Callable[["DenseLayer", Call, list[State], State], None]


def at_once(call: Call, layer: DenseLayer) -> State | None:
    """Return the state of one token over a layer's only source and all own rows, where the source has it.

    Such a source has a method `step(call, layer)`; None: its state and the own rows' are merged as ever.
    """
    if len(layer.sources) != 1 or call.query.shape[2] > 1 or layer.observer is not None:
        return None
    step = getattr(layer.sources[0], "step", None)
    return None if step is None else step(call, layer)
