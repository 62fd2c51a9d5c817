"""The latest queries of an evicting layer, which methods score its rows by."""

from __future__ import annotations

import torch

from kvexp.attention.function import Call


class Window:
    """The latest queries of a layer, after rotation: queries [B, Hq, w, D], slots [B, w], real [B, w]."""

    def __init__(self, queries: torch.Tensor, slots: torch.Tensor, real: torch.Tensor) -> None:
        self.queries, self.slots, self.real = queries, slots, real

    def tensors(self) -> list[torch.Tensor]:
        """The tensors held."""
        return [self.queries, self.slots, self.real]

    def last(self, size: int) -> Window:
        """Return the latest `size` of the queries."""
        if size >= self.slots.shape[1]:
            return self
        return Window(self.queries[:, :, -size:], self.slots[:, -size:], self.real[:, -size:])

    def select(self, index: torch.Tensor) -> Window:
        """Return the window of the sequences `index`."""
        return Window(*(x.index_select(0, index.to(x.device)) for x in self.tensors()))

    @staticmethod
    def grown(before: Window | None, call: Call, slots: torch.Tensor, size: int) -> Window:
        """Return the last `size` real queries of each sequence, those of `call` (at `slots` [T]) included."""
        query = call.query
        batch, length = query.shape[0], query.shape[2]
        real = call.padding.at(slots)
        real = torch.ones(batch, length, dtype=torch.bool, device=query.device) if real is None else real
        new = Window(query, slots.to(torch.int32)[None].expand(batch, -1), real)
        if before is not None:
            pairs = zip(before.tensors(), new.tensors(), (2, 1, 1), strict=True)
            new = Window(*(torch.cat([a.expand(batch, *a.shape[1:]), b], dim=d) for a, b, d in pairs))
        if call.padding.pads(0, int(slots[-1]) + 1):  # pads first, real queries in their order behind them
            order = new.real.to(torch.int8).argsort(dim=1, stable=True)
            by_head = order[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
            new = Window(
                new.queries.gather(2, by_head), new.slots.gather(1, order), new.real.gather(1, order)
            )
        # A copy, not a view: the rest of a long prompt's queries must not stay in memory.
        return Window(
            new.queries[:, :, -size:].clone(), new.slots[:, -size:].clone(), new.real[:, -size:].clone()
        )
