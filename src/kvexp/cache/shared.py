"""Rows of an encoded context that many queries stand on: read by every fork, copied by none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvexp.attention.function import Call
from kvexp.attention.local import attend

if TYPE_CHECKING:
    from kvexp.cache.dense import DenseLayer
    from kvexp.cache.source import State


class SharedRows:
    """The rows of an encoded context, read by every fork: keys/values [1 or B, H, P, D], slots [P].

    positions [1 or B, P]; all slots lie in `span` = (first, one past the last). Every query comes later.
    The rows below slot `clean` were real tokens in every sequence when they were encoded.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        span: tuple[int, int],
        clean: int = 0,
    ) -> None:
        self.keys, self.values, self.slots, self.positions, self.span = keys, values, slots, positions, span
        self.clean, self.batch, self.entries = clean, keys.shape[0], keys.shape[2]

    def tensors(self) -> list[torch.Tensor]:
        """The shared tensors, by reference."""
        return [self.keys, self.values]

    def select(self, index: torch.Tensor) -> SharedRows:
        """Return the rows of the sequences `index`; rows that serve any batch are shared on."""
        if self.batch == 1:
            return self
        chosen = index.to(self.keys.device)
        keys, values = (x.index_select(0, chosen) for x in (self.keys, self.values))
        positions = self.positions
        if positions.shape[0] > 1:
            positions = positions.index_select(0, chosen)
        return SharedRows(keys, values, self.slots, positions, self.span, self.clean)

    def state(self, call: Call, layer: DenseLayer) -> State:
        """Attend over the shared rows."""
        return self.attended(call, layer, *self.expanded(call))

    def expanded(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows as per-head keys and values (MLA stores latents)."""
        if hasattr(call.module, "expand_kv"):
            return call.module.expand_kv(self.keys, self.values)  # type: ignore[operator]
        return self.keys, self.values

    def attended(self, call: Call, layer: DenseLayer, key: torch.Tensor, value: torch.Tensor) -> State:
        """Return the state of the call's queries over these rows."""
        batch, heads, length, width = call.query.shape
        call.padding.refuse_inside(self.span[0], self.clean)
        real = call.padding.at(self.slots) if call.padding.pads(*self.span) else None
        if key.shape[0] == 1 and real is None:  # one shared context: the whole batch is one long query block
            folded = call.query.transpose(0, 1).reshape(1, heads, batch * length, width)
            a, s = attend(folded, key, value, call.scale, backend=layer.backend)
            a = a.view(heads, batch, length, -1).transpose(0, 1)
            return a, s.view(heads, batch, length).transpose(0, 1)
        visible = None if real is None else real[:, None, None, :].expand(-1, -1, length, -1)
        if key.shape[0] == 1:
            key, value = key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)
        return attend(call.query, key, value, call.scale, visible, backend=layer.backend)
