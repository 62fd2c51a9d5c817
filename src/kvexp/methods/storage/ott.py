"""OTT: blocks of tokens in few bits, but for the few with the smallest keys, which stay in full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvexp.errors import UserError
from kvexp.methods.storage.base import StorageMethod

if TYPE_CHECKING:
    from kvexp.cache.scheme import Scheme


@dataclass(frozen=True)
class Ott(StorageMethod):
    """Quantise as KIVI does, a block of G tokens at a time, and keep each head's outlier tokens in full.

    Source: Su et al., "Accurate KV Cache Quantization with Outlier Tokens Tracing" (2025, arXiv 2505.10938).
    Channels of keys are uniform but for few tokens with very small keys, which widen the range of their
    group. Once `residual` newer ones have come, the G = `group` tokens of a block compete with the outliers
    that a KV head has: the `outliers` ones with the smallest sum |K| over channels are in full from then on.
    In the block they are replaced by a mean, and masked. Those that later ones replace stay in full as well,
    up to `pool` of them; a head for which there is no room left takes no others.

    `outliers`: tokens of a head that are traced. 0: none, which is kivi with values=blocks.
    `pool`: room for replaced outliers.
    `skip`: the first layers, in which no outliers are kept.

    Departures: written from the paper's description. A block's outliers are replaced by the mean of its other
    tokens, not of all, so that no range is widened by them. Blocks of a context compete one after the other,
    as they do while decoding. Values of a token are packed in groups of `group` channels, or of all that a
    head has where these are fewer.
    """

    id: ClassVar[str] = "ott"
    paper: ClassVar[str] = "Accurate KV Cache Quantization with Outlier Tokens Tracing"
    year: ClassVar[str] = "2025"

    group: int = 128
    residual: int = 32
    outliers: int = 3
    pool: int = 32
    skip: int = 2

    def __post_init__(self) -> None:
        """Refuse counts that make no sense."""
        super().__post_init__()
        for name in ("outliers", "pool", "skip"):
            if getattr(self, name) < 0:
                raise UserError(f"method.{name}={getattr(self, name)} is no count: use 0 or more")
        if self.outliers >= self.group:
            raise UserError(
                f"method.outliers={self.outliers} leaves no other token in a block of"
                f" method.group={self.group}: use fewer outliers, such as 3"
            )

    def scheme(self, layer: int) -> Scheme:
        """Return the scheme of a layer: the first ones keep no outliers."""
        from kvexp.cache.scheme import Scheme

        outliers = 0 if layer < self.skip else self.outliers
        return Scheme(self.bits, self.group, self.residual, True, outliers, self.pool)
