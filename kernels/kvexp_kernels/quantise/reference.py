"""Asymmetric min-max quantisation of rows in groups, and the bytes that hold it.

Of a group of numbers, b bits each: q = round(clamp((x - m) / s, 0, 2^b - 1)), s = (max - min) / (2^b - 1),
m = min, and q s + m gives them back (Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV
Cache", 2024, arXiv 2402.02750). A group is some consecutive rows of one channel, or some channels of one row.
Codes lie side by side along the channels of a row whichever way groups run, so that any rows can be cut out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

BITS = (2, 4, 8)
_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Packed:
    """S rows of `width` numbers; `codes [..., S, ceil(width * bits / 8)]` uint8, scale and minimum float16.

    dim -2: groups of `group` rows of a channel, `scale`, `minimum [..., ceil(S / group), width]`; dim -1:
    groups of `group` channels of a row, `[..., S, ceil(width / group)]`. A last group may be shorter.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor
    bits: int
    group: int
    dim: int
    width: int

    @property
    def rows(self) -> int:
        """S."""
        return self.codes.shape[-2]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and minima."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Codes, scale, minimum."""
        return [self.codes, self.scale, self.minimum]

    def each(self, function: Callable[[Tensor], Tensor]) -> Packed:
        """Return rows made by applying `function`, which leaves the last two axes alone, to each tensor."""
        codes, scale, minimum = (function(x) for x in self.tensors())
        return replace(self, codes=codes, scale=scale, minimum=minimum)

    def part(self, start: int, stop: int) -> Packed:
        """Return the rows start, ..., stop - 1, none copied; where groups run over rows, whole groups."""
        groups = slice(start, stop)
        if self.dim == -2:
            if start % self.group or (stop % self.group and stop != self.rows):
                raise ValueError(f"rows {start} to {stop} are no whole groups of {self.group}")
            groups = slice(start // self.group, math.ceil(stop / self.group))
        return replace(
            self,
            codes=self.codes[..., start:stop, :],
            scale=self.scale[..., groups, :],
            minimum=self.minimum[..., groups, :],
        )

    def dequantise(
        self, dtype: torch.dtype = torch.float32, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Return the rows start, ..., stop - 1 (any rows) as numbers; computed in float32, then rounded."""
        stop = self.rows if stop is None else stop
        codes = unpack_bits(self.codes[..., start:stop, :], self.bits, self.width).float()
        scale, minimum = (self._spread(x, start, stop) for x in (self.scale, self.minimum))
        return (codes * scale + minimum).to(dtype)

    def _spread(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return a number of each group for each of its members."""
        if self.dim == -1:
            return x[..., start:stop, :].float().repeat_interleave(self.group, -1)[..., : self.width]
        first = start // self.group
        wide = x[..., first : math.ceil(stop / self.group), :].float().repeat_interleave(self.group, -2)
        return wide[..., start - first * self.group : stop - first * self.group, :]


def quantise(x: Tensor, bits: int, group: int, dim: int) -> Packed:
    """Quantise rows `x [..., S, width]` in groups along `dim` (-2: rows, -1: channels); see `Packed`.

    Computed in float32 from the scale and the minimum as they are stored, so that their rounding to float16
    moves codes instead of adding to the error. Where all numbers of a group are equal, s = 0 and all codes
    are 0. Raises ValueError for other bits, dims or an empty group.
    """
    if bits not in BITS or group < 1 or dim not in (-2, -1):
        raise ValueError(f"bits={bits}, group={group}, dim={dim}: bits are 2, 4 or 8, dim is -2 or -1")
    length = x.shape[dim]
    grouped = _padded(x.float(), group, dim).unflatten(dim, (-(-length // group), group))
    low, high = grouped.amin(dim), grouped.amax(dim)
    minimum = low.clamp(-_LARGEST, _LARGEST).half()
    scale = ((high - minimum.float()) / (2**bits - 1)).clamp(0, _LARGEST).half()
    step = scale.float().masked_fill(scale == 0, 1.0).unsqueeze(dim)
    codes = ((grouped - minimum.float().unsqueeze(dim)) / step).clamp(0, 2**bits - 1).round()
    codes = codes.to(torch.uint8).flatten(dim - 1, dim).narrow(dim, 0, length)
    return Packed(pack_bits(codes, bits), scale, minimum, bits, group, dim, x.shape[-1])


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack `codes [..., n]` uint8, each below 2^bits, into `[..., ceil(n * bits / 8)]` bytes.

    The first code takes the lowest bits of the first byte; bits that are left over are zero.
    """
    each = 8 // bits
    if each == 1:
        return codes.contiguous()
    missing = -codes.shape[-1] % each
    codes = torch.nn.functional.pad(codes, (0, missing)).unflatten(-1, (-1, each))
    return (codes << _shifts(bits, codes.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, bits: int, n: int) -> Tensor:
    """Return the n codes of each row of bytes, `[..., n]` uint8."""
    if bits == 8:
        return packed
    codes = (packed.unsqueeze(-1) >> _shifts(bits, packed.device)) & (2**bits - 1)
    return codes.flatten(-2)[..., :n]


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)


def _padded(x: Tensor, group: int, dim: int) -> Tensor:
    """Repeat the last slice up to a whole number of groups: no minimum or maximum changes."""
    missing = -x.shape[dim] % group
    if not missing:
        return x
    last = x.narrow(dim, x.shape[dim] - 1, 1)
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, last.expand(shape)], dim)
