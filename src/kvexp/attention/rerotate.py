"""Move cached keys to other positions: turn them by the difference of two rotations of the model's own table.

Cached keys stay as the model made them, and a key that does not move keeps its very bits. Angles come from
the model's rotary table in float32, whatever its rope type: the cosine and sine of a difference are taken
from those of both positions, so that a moved key differs from one that the model rotates at the new position
by rounding alone, also where the table itself is off by some rounding at far positions. The table's scaling
(YaRN) is in a cached key and stays in it; numbers that do not rotate are left alone.

In multi-head latent attention the cache holds a latent, which no position enters, and apart from it the
rotated key that all heads share. `Rotary.ordered` gives the part that turns first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvexp.attention import families
from kvexp.attention.bands import Bands, bands, wide
from kvexp.attention.rope import attention_scaling, each_angle
from kvexp_kernels.backend import fused
from kvexp_kernels.rerotate import Turn, rerotate

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Angles:
    """A rotation for each row: cos and sin [..., F], and which numbers of a key [..., D] they turn."""

    bands: Bands
    cos: torch.Tensor
    sin: torch.Tensor

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., D] turned, a new tensor in float32 at least; angles broadcast over leading axes."""
        return self._turned(x, self.sin)

    def moved(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows x [B, H, T, D] turned, in their own dtype; by one kernel where there is one."""
        if x.dim() == 4 and fused(x, self.cos, self.sin):
            return rerotate(x, self.kernel_turn())
        return self.turn(x).to(x.dtype)

    def kernel_turn(self) -> Turn:
        """Return the rotation as kernels take it."""
        return Turn(self.cos, self.sin, self.bands.after == "adjacent", self.bands.last)

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """Undo `turn`."""
        return self._turned(x, -self.sin)

    def _turned(self, x: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x if x.dtype == torch.float64 else x.float()
        out = torch.empty_like(x) if 2 * self.bands.count == x.shape[-1] else x.clone()
        (left, right), (new_left, new_right) = self._pairs(x), self._pairs(out)
        torch.mul(left, self.cos, out=new_left).addcmul_(right, sin, value=-1)
        torch.mul(right, self.cos, out=new_right).addcmul_(left, sin)
        return out

    def quarter(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., D] turned by a quarter in each band; numbers that do not rotate are 0."""
        out = torch.zeros_like(x)
        (left, right), (new_left, new_right) = self._pairs(x), self._pairs(out)
        torch.neg(right, out=new_left)
        new_right.copy_(left)
        return out

    def whole(self, width: int) -> Pair:
        """Return (c, s) [..., D] for rows of D = `width` numbers: turn(x) = x * c + quarter(x) * s.

        Quicker where few different rows are turned by many angles.
        """
        shape = *self.cos.shape[:-1], width
        found = self.cos.new_ones(shape), self.sin.new_zeros(shape)
        for x, factor in zip(found, (self.cos, self.sin), strict=True):
            for half in self._pairs(x):
                half.copy_(factor)
        return found

    def _pairs(self, x: torch.Tensor) -> Pair:
        """Views of the two numbers of each band in x [..., D]."""
        width = 2 * self.bands.count
        at = x.shape[-1] - width if self.bands.last else 0
        x = x[..., at : at + width]
        if self.bands.after == "adjacent":
            return x[..., ::2], x[..., 1::2]
        left, right = x.split(self.bands.count, dim=-1)
        return left, right

    def unsqueeze(self, dim: int) -> Angles:
        """Return the angles with one more axis, to broadcast over heads."""
        return Angles(self.bands, self.cos.unsqueeze(dim), self.sin.unsqueeze(dim))

    def at(self, *index: Any) -> Angles:
        """Return the angles of the rows `index`."""
        return Angles(self.bands, self.cos[index], self.sin[index])


class Rotary:
    """How each layer of a model rotates what it caches."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config.get_text_config()
        self.family = families.of(self.config)
        self._bands: dict[str, Bands] = {}

    def kind(self, layer: int) -> str | None:
        """Return a name for the rotation of a layer, equal where it is the same; None: it does not rotate."""
        if not self.family.rotated(self.config)[layer]:
            return None
        return str(self.config.layer_types[layer]) if self.family.typed_rotary else ""

    def ordered(self, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Return (the part that turns, the other) of what a layer caches; its own inverse.

        Keys and values, but in MLA the shared rotated key, and the latent.
        """
        return (values, keys) if self.family.latent else (keys, values)

    def angles(self, layer: int, positions: torch.Tensor) -> Angles | None:
        """Return the rotation from no position at all to `positions` [...], without the table's scaling."""
        kind = self.kind(layer)
        if kind is None:
            return None
        if kind not in self._bands:
            self._bands[kind] = bands(self.model, layer)
        found = self._bands[kind]
        flat = positions.reshape(1, -1)
        typed = (self.config.layer_types[layer],) if self.family.typed_rotary else ()
        double = self.model.dtype == torch.float64
        like = torch.empty(0, dtype=torch.float64 if double else torch.float32, device=positions.device)
        scaling = attention_scaling(self.model, layer)
        cos, sin = (
            each_angle(table[0] / scaling, self.family.table).unflatten(0, positions.shape)
            for table in self.model.base_model.rotary_emb(like, flat, *typed)
        )
        return Angles(found, cos, sin)

    def shift(self, layer: int, old: torch.Tensor, new: torch.Tensor) -> Angles | None:
        """Return the rotation from positions `old` to `new`, which broadcast; None: nothing rotates.

        Where both are equal it is the identity to the last bit.
        """
        before, after = self.angles(layer, old), self.angles(layer, new)
        if before is None or after is None:
            return None
        c0, s0, c1, s1 = (wide(x) for x in (before.cos, before.sin, after.cos, after.sin))
        same = (old == new)[..., None].to(c0.device)
        cos = (c1 * c0 + s1 * s0).masked_fill(same, 1.0)
        sin = (s1 * c0 - c1 * s0).masked_fill(same, 0.0)
        return Angles(before.bands, cos.to(before.cos), sin.to(before.sin))


def moved(
    rotary: Rotary, layer: int, keys: torch.Tensor, values: torch.Tensor, old: torch.Tensor, new: torch.Tensor
) -> Pair:
    """Return the cached keys and values [..., T, D] of a layer as they are at positions `new` [T].

    `old` [T] are the positions that they were made at. Turned in float32 (float64 for float64), and returned
    in their own dtype.
    """
    angles = rotary.shift(layer, old, new)
    turning, still = rotary.ordered(keys, values)
    if angles is not None:
        turning = angles.moved(turning)
    return rotary.ordered(turning, still)
