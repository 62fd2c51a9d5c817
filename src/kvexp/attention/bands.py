"""Rotary bands: the pairs of numbers that turn together, read as complex numbers.

Band f of a query or key is one complex number that RoPE multiplies by exp(i inv_freq[f] position). A score is
then Re(sum over bands of q_f conj(k_f)) plus the dot product of the numbers that do not rotate. Dot products
never see how bands are laid out, but whoever builds a vector against cached keys has to know it: in MLA the
model's own rotation also moves pairs, so a tapped query and a rotated key hold them in different places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from kvexp.attention import families
from kvexp.attention.rope import attention_scaling

Pairs = Literal["halves", "adjacent"]
Split = tuple[torch.Tensor, torch.Tensor]  # (turning [..., F] complex, still [..., D - 2F] real)


@dataclass(frozen=True)
class Bands:
    """The F bands of one layer.

    inv_freq [F] float64: radians per token, as the model scales them; F = 0 where a layer does not rotate.
    scaling: the factor s that the model puts on rotated numbers (YaRN; 1 elsewhere). `rotated` leaves it in.
    last: whether the last numbers of a head rotate (MLA) instead of the first.
    before, after: which numbers pair up in a tapped query, and in a rotated query or key: i and i + F
        (`halves`), or 2i and 2i + 1 (`adjacent`).
    """

    inv_freq: torch.Tensor
    scaling: float = 1.0
    last: bool = False
    before: Pairs = "halves"
    after: Pairs = "halves"

    @property
    def count(self) -> int:
        """F."""
        return len(self.inv_freq)

    def tapped(self, x: torch.Tensor) -> Split:
        """Split queries or keys [..., D] as they are before rotation."""
        return self._split(x, self.before)

    def rotated(self, x: torch.Tensor) -> Split:
        """Split queries or keys [..., D] as the model rotated and caches them."""
        return self._split(x, self.after)

    def joined(self, turning: torch.Tensor, still: torch.Tensor) -> torch.Tensor:
        """Return the real vectors [..., D] that `rotated` would split into these: its inverse."""
        pairs = torch.view_as_real(turning)  # [..., F, 2]
        flat = (pairs if self.after == "adjacent" else pairs.mT).flatten(-2)
        return torch.cat([still, flat] if self.last else [flat, still], dim=-1)

    def phases(self, positions: torch.Tensor) -> torch.Tensor:
        """Return exp(i inv_freq position), positions [...] to [..., F] complex128."""
        at = wide(positions)
        angles = at[..., None] * self.inv_freq.to(at.device)
        return torch.polar(torch.ones_like(angles), angles)

    def turned_back(self, x: torch.Tensor, positions: torch.Tensor) -> Split:
        """Undo the model's rotation and scaling of x [..., T, D] at positions [..., T] that broadcast.

        In float64 phases, whatever the model rotated with.
        """
        turning, still = self.rotated(x)
        back = self.phases(positions).conj().to(turning.device, turning.dtype)
        return turning * back / self.scaling, still

    def _split(self, x: torch.Tensor, pairs: Pairs) -> Split:
        x = x if x.dtype == torch.float64 else x.float()
        width = 2 * self.count
        at = x.shape[-1] - width if self.last else width
        still, turning = (x[..., :at], x[..., at:]) if self.last else (x[..., at:], x[..., :at])
        if pairs == "adjacent":
            return torch.complex(turning[..., ::2].contiguous(), turning[..., 1::2].contiguous()), still
        real, imaginary = turning.split(self.count, dim=-1) if width else (turning, turning)
        return torch.complex(real.contiguous(), imaginary.contiguous()), still


def bands(model: Any, layer_index: int) -> Bands:
    """Return the bands of a layer, from the rotary table that the model itself uses."""
    config = model.config.get_text_config()
    family = families.of(config)
    if not family.rotated(config)[layer_index]:
        return Bands(torch.empty(0, dtype=torch.float64))
    kind = f"{config.layer_types[layer_index]}_" if family.typed_rotary else ""
    inv_freq = getattr(model.base_model.rotary_emb, f"{kind}inv_freq").detach().cpu().double()
    pairing = family.query_pairing(config)
    return Bands(
        inv_freq,
        attention_scaling(model, layer_index),
        family.latent,
        "halves" if pairing == "halves" else "adjacent",
        "adjacent" if pairing == "adjacent" else "halves",
    )


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return x as float64, on the CPU where its device has no such numbers."""
    return (x.cpu() if x.device.type == "mps" else x).double()
