"""KIVI: keys in few bits by channel, values by token, the newest rows in full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvexp.errors import UserError
from kvexp.methods.storage.base import StorageMethod

if TYPE_CHECKING:
    from kvexp.cache.scheme import Scheme


@dataclass(frozen=True)
class Kivi(StorageMethod):
    """Quantise keys per channel in groups of tokens, values per token in groups of channels.

    Source: Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (2024, arXiv
    2402.02750). Of a group of G numbers, b bits each: q = round((x - min) / s), s = (max - min) / (2^b - 1);
    q s + min comes back. With R = `residual`, keys (rotated, as they are stored) are packed R at a time, so
    that the newest n mod R of n stay in full, and each value when R newer ones have come, so that exactly R
    do.

    `values`: `rows` as above, or `blocks`: keys and values of `group` tokens together, once `residual` newer
        ones have come, which is OTT without its outliers.

    Departures: scale and minimum are rounded to float16 before the codes are chosen, which then make up for
    their rounding. Where `group` does not divide a head's channels, its last group is shorter. Latent
    attention (MLA) caches one latent row and one rotated row in place of keys and values: these are packed.
    """

    id: ClassVar[str] = "kivi"
    paper: ClassVar[str] = "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache"
    year: ClassVar[str] = "2024"

    values: Literal["rows", "blocks"] = "rows"

    def __post_init__(self) -> None:
        """Refuse a residual that would cut groups of keys."""
        super().__post_init__()
        if self.values == "rows" and (self.residual == 0 or self.residual % self.group):
            nearest = max(1, self.residual // self.group) * self.group
            raise UserError(
                f"method.residual={self.residual} is no multiple of method.group={self.group}, and keys are"
                f" quantised a residual at a time: use method.residual={nearest}"
            )

    def scheme(self, layer: int) -> Scheme:
        """Return the scheme, the same for all layers."""
        from kvexp.cache.scheme import Scheme

        return Scheme(self.bits, self.group, self.residual, blockwise=self.values == "blocks")
