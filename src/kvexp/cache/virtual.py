"""A virtual prefix: P tokens seen, no rows stored; each query looks its attention state up in a memory."""

from __future__ import annotations

from typing import Protocol

import torch

from kvexp.attention.function import Call
from kvexp.cache.dense import DenseLayer


class StateLookup(Protocol):
    """A memory of one layer: what `Virtual` asks of it."""

    entries: int
    steps: bool  # whether `step` may give something

    def find(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (a [n, Hq, Dv], log Z [n, Hq]) for key-space queries [n, Hq, D]."""
        ...

    def key_queries(self, call: Call, positions: torch.Tensor) -> torch.Tensor:
        """Return the queries in the space of the memory's keys, [B, Hq, T, D]."""
        ...

    def step(
        self, x: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return (a [B, Hq, Dv], s [B, Hq]) of one token each, merged with local attention; None: do not."""
        ...

    def tensors(self) -> list[torch.Tensor]:
        """The tensors held."""
        ...


class Virtual:
    """A source whose states come from a lookup: nothing of the prefix of `seen` tokens is attended to."""

    batch = 1

    def __init__(self, lookup: StateLookup, counters: dict[str, int], seen: int) -> None:
        self.lookup, self.counters, self.entries, self.seen = lookup, counters, lookup.entries, seen

    def tensors(self) -> list[torch.Tensor]:
        """The memory's tensors."""
        return self.lookup.tensors()

    def select(self, index: torch.Tensor) -> Virtual:
        """A memory serves any batch."""
        return self

    def step(self, call: Call, layer: DenseLayer) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the state over the prefix and the layer's own rows, all visible, for one token each."""
        if not self.lookup.steps:
            return None
        call.padding.refuse_inside(0, self.seen)
        x = self.lookup.key_queries(call, layer.q_positions)[:, :, 0]
        done = self.lookup.step(x, call.query[:, :, 0], call.key, call.value, call.scale)
        if done is None:
            return None
        self.counters["looked_up"] = self.counters.get("looked_up", 0) + len(x)
        a, s = done
        return a[:, :, None], s[:, :, None]

    def state(self, call: Call, layer: DenseLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """Look up every real query token's state; pads get zeros, which nothing reads."""
        call.padding.refuse_inside(0, self.seen)
        query = self.lookup.key_queries(call, layer.q_positions).transpose(1, 2)
        batch, length, heads, width = query.shape
        padded = call.padding.pads(layer.seen - length, layer.seen) > 0
        real = call.padding.at(layer.q_slots) if padded else None
        x = query.reshape(batch * length, heads, width) if real is None else query[real]
        a, s = self.lookup.find(x)
        self.counters["looked_up"] = self.counters.get("looked_up", 0) + len(x)
        if real is not None:
            every_a, every_s = a.new_zeros(batch, length, *a.shape[1:]), s.new_zeros(batch, length, heads)
            every_a[real], every_s[real] = a, s
            a, s = every_a, every_s
        a = a.view(batch, length, heads, -1).transpose(1, 2)
        return a, s.view(batch, length, heads).transpose(1, 2)
