"""Quantised rows that every fork reads and none copies: a *source* of `kvexp.cache.dense`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvexp.attention.function import Call
from kvexp.cache.packing import Packed
from kvexp_kernels.dequant_attend import dequant_attend

if TYPE_CHECKING:
    from kvexp.cache.dense import DenseLayer
    from kvexp.cache.source import State


@dataclass(frozen=True)
class PackedPair:
    """Keys and values of the same rows, [B, H, S, D]; `keys` may hold more rows, which are not attended to.

    `hidden` [B, H, P] int32: rows that a head does not see here, since they are kept in full elsewhere; -1 is
    none. None: every head sees all.
    """

    keys: Packed
    values: Packed
    hidden: torch.Tensor | None = None

    @property
    def batch(self) -> int:
        """Sequences that are told apart."""
        return self.values.codes.shape[0]

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor held."""
        found = [*self.keys.tensors(), *self.values.tensors()]
        return found if self.hidden is None else [*found, self.hidden]

    def select(self, index: torch.Tensor) -> PackedPair:
        """Return the rows of the sequences `index`."""

        def chosen(x: torch.Tensor) -> torch.Tensor:
            return x.index_select(0, index.to(x.device))

        hidden = None if self.hidden is None else chosen(self.hidden)
        return PackedPair(self.keys.each(chosen), self.values.each(chosen), hidden)

    def state(self, call: Call, query: torch.Tensor) -> State:
        """Attend over all rows; every query comes later."""
        expand = getattr(call.module, "expand_kv", None)  # MLA stores latents
        return dequant_attend(query, self.keys, self.values, call.scale, self._visible(), expand)

    def _visible(self) -> torch.Tensor | None:
        if self.hidden is None:
            return None
        rows = self.values.rows
        shown = torch.ones(*self.hidden.shape[:2], rows + 1, dtype=torch.bool, device=self.hidden.device)
        where = self.hidden.long().masked_fill(self.hidden < 0, rows)  # one place more, for no row
        return shown.scatter_(-1, where, False)[..., :rows]


class PackedRows:
    """Finished packed rows: one pair for the batch, or one for each sequence where they differ in length."""

    def __init__(self, pairs: list[PackedPair | None]) -> None:
        self.pairs = pairs
        held = [pair for pair in pairs if pair is not None]
        self.entries = max(pair.values.rows for pair in held)
        self.batch = len(pairs) if len(pairs) > 1 else held[0].batch

    def tensors(self) -> list[torch.Tensor]:
        """The shared tensors, by reference."""
        return [t for pair in self.pairs if pair is not None for t in pair.tensors()]

    def select(self, index: torch.Tensor) -> PackedRows:
        """Return the rows of the sequences `index`; rows that serve any batch are shared on."""
        if self.batch == 1:
            return self
        if len(self.pairs) > 1:
            return PackedRows([self.pairs[i] for i in index.tolist()])
        (pair,) = self.pairs
        assert pair is not None
        return PackedRows([pair.select(index)])

    def state(self, call: Call, layer: DenseLayer) -> State:
        """Attend over the rows."""
        return state_of(self.pairs, call)


def state_of(pairs: list[PackedPair | None], call: Call) -> State:
    """Return the state over one pair for the whole batch, or over one for each sequence (None: no row)."""
    if len(pairs) == 1 and pairs[0] is not None:
        return pairs[0].state(call, call.query)
    states = []
    for b, pair in enumerate(pairs):
        query = call.query[b : b + 1]
        if pair is not None:
            states.append(pair.state(call, query))
            continue
        nothing = query.new_zeros(*query.shape[:3], call.value.shape[-1])
        lse = torch.float64 if query.dtype == torch.float64 else torch.float32
        states.append((nothing, torch.full_like(nothing[..., 0], -torch.inf, dtype=lse)))
    return torch.cat([a for a, _ in states]), torch.cat([s for _, s in states])
