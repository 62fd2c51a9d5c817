"""Group-wise quantisation to 2, 4 or 8 bits, with the codes packed into bytes."""

from __future__ import annotations

from kvexp_kernels.quantise.reference import BITS, Packed, pack_bits, quantise, unpack_bits

__all__ = ["BITS", "Packed", "pack_bits", "quantise", "unpack_bits"]
