"""What every reuse method is: which rows are placed, which tokens are recomputed, how the rest is mended.

A context is an exact prefix (its header) and units of text. Units are encoded once, somewhere else, and kept
in a chunk store; a method places their rows at their new positions and repairs what it can. What comes out is
an ordinary cache, so that queries, which are always run in full, fork it as they fork any other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from kvexp.errors import UserError
from kvexp.methods.base import Method
from kvexp.methods.baseline.full import Full

if TYPE_CHECKING:
    from torch import Tensor

    from kvexp.budget import Budget
    from kvexp.cache.chunk_store import ChunkStore, Codec
    from kvexp.cache.kv_cache import KVCache
    from kvexp.methods.reuse.forward import Run
    from kvexp.methods.reuse.geometry import Geometry
    from kvexp.methods.reuse.sheet import Piece
    from kvexp.methods.reuse.units import Encoder
    from kvexp.prompt import Context

LEAST = Fraction(1, 10**6)  # less is no token of any text that fits into a model
_FAR = re.compile(r"[eE][+-]?[0_]*[1-9][\d_]{2}")  # an exponent of three digits: its power may be huge


@dataclass(frozen=True)
class ReuseMethod(Method):
    """Base of the family: which rows are placed, and how they are repaired. As it stands, neither."""

    family: ClassVar[str] = "reuse"
    uses_budget: ClassVar[bool] = False

    def codec(self, model: Any) -> Codec | None:
        """Return how rows are stored; None: exactly."""
        return None

    def opened(self, model: Any, folder: Path | None = None, sha256: str | None = None) -> ChunkStore:
        """Return an empty store for `model`, or the one in `folder`; `encode` takes it as its memory.

        `sha256` names the model's weights, where it is known.
        """
        from kvexp.cache.chunk_store import ChunkStore

        return ChunkStore(model, capacity=1)

    def encode(
        self,
        model: Any,
        context: Context | Sequence[int] | Sequence[Context],
        memory: Any = None,
        budget: Budget | int | str | None = None,
        query: Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> KVCache:
        """Return a cache of `context`, placed and repaired; several contexts are one batch.

        `memory` is a store from `opened`, which contexts then share; without one, nothing outlives the call.
        `query` is what will be asked, one for all contexts or one for each; methods that read it need it.
        """
        from kvexp.methods.reuse.encode import encode

        return encode(self, model, context, memory, query)

    def pieces(self, encoder: Encoder, geometry: Geometry) -> list[Piece]:
        """Return the stored chunks that are placed, headers among them."""
        return []

    def reusable(self, geometry: Geometry) -> Tensor:
        """Return which columns are counted as reused or recomputed, [B, C] bool: tokens of units."""
        return geometry.in_units()

    def repair(self, run: Run) -> None:
        """Recompute what the method recomputes, and correct what it corrects."""

    def finish(self, run: Run, store: ChunkStore) -> None:
        """Keep what the next context may use."""


@dataclass(frozen=True)
class StoredMethod(ReuseMethod):
    """Base of methods that keep rows in a store.

    `store`: in `memory`, or on `disk` as well, for other runs on the same model.
    `store_mb`: how much is kept, in MB of 10^6 bytes; the least recently used leave.
    """

    store: Literal["memory", "disk"] = "memory"
    store_mb: int = 2048

    def __post_init__(self) -> None:
        """Refuse knobs that make no sense, before anything loads."""
        if self.store_mb < 1:
            raise UserError(f"method.store_mb={self.store_mb} is not possible: use 1 or more")

    def opened(self, model: Any, folder: Path | None = None, sha256: str | None = None) -> ChunkStore:
        """Return an empty store for `model`, or the one in `folder`; `encode` takes it as its memory."""
        from kvexp.cache.chunk_store import ChunkStore

        if self.store == "disk" and folder is None:
            raise UserError("method.store=disk needs a folder: method.opened(model, folder), or store=memory")
        where = folder if self.store == "disk" else None
        return ChunkStore(model, self.store_mb * 10**6, where, self.codec(model), sha256)


@dataclass(frozen=True)
class PlacedMethod(StoredMethod):
    """Base of methods that place units which were encoded somewhere else.

    A context of one unit behind its header is stored as it stands, and would be reused without an error:
    tasks with such contexts are refused.

    `encoded`: a unit's rows come from a forward over the header and the unit (`behind_header`), over the unit
        alone at position 0 (`alone`), or over the header and a group of the context's units in another order,
        as an earlier prompt would have held them (`old_context`).
    `old_group`: units in such an earlier prompt.
    `stored`: the method that says how rows of units are stored: `full` (exactly), `kivi` or `ott`, or
        {name: kivi, bits: 4}. All rows of a unit are packed. Headers are always stored exactly.
    """

    needs_units: ClassVar[bool] = True

    encoded: Literal["behind_header", "alone", "old_context"] = "behind_header"
    old_group: int = 5
    stored: Method = field(default_factory=Full)

    def __post_init__(self) -> None:
        """Refuse knobs that make no sense, before anything loads."""
        super().__post_init__()
        if self.old_group < 1:
            raise UserError(f"method.old_group={self.old_group} is not possible: use 1 or more")
        if self.stored.id != "full" and not hasattr(self.stored, "packed"):
            raise UserError(f"method.stored={self.stored.id} stores no rows: use full (exactly), kivi or ott")
        of = getattr(self.stored, "of", None)
        if of is not None and of.id != "full":
            raise UserError(
                f"method.stored={{name: {self.stored.id}, of: {of.id}}} is not possible, since a store holds"
                " every row of a unit: leave `of` out"
            )

    def codec(self, model: Any) -> Codec | None:
        """Return how rows of units are stored; None: exactly."""
        from kvexp.methods.reuse.codec import PackedCodec

        return None if self.stored.id == "full" else PackedCodec(cast(Any, self.stored), model.dtype)

    def pieces(self, encoder: Encoder, geometry: Geometry) -> list[Piece]:
        """Return the header and the units of each context, from the store or encoded now."""
        from kvexp.methods.reuse.units import pieces

        return pieces(encoder, geometry, self.encoded, self.old_group)


@dataclass(frozen=True)
class RepairMethod(PlacedMethod):
    """Base of methods that recompute a share of the tokens.

    `recompute`: the share, as text: 0.1, 10% or 1/10. Of a unit of n tokens it is ceil(share * n) tokens,
        computed exactly; a method that chooses over the whole context takes the sum over its units.
    """

    recompute: str | float = "0.1"

    def __post_init__(self) -> None:
        """Refuse what is no share."""
        super().__post_init__()
        object.__setattr__(self, "recompute", shown(self.share))

    @property
    def share(self) -> Fraction:
        """The share as an exact fraction."""
        return parsed(self.recompute)

    @property
    def expects(self) -> tuple[str, ...]:  # type: ignore[override]
        """Counters that must be above zero: a share of 1 reuses nothing."""
        return ("reused", "recomputed") if self.share < 1 else ("recomputed",)

    def refuse_check_of_nothing(self, check: int) -> None:
        """Raise UserError where the check layer would measure rounding, and tokens be chosen from it."""
        if check == 0 and self.stored.id == "full":
            raise UserError(
                "method.check=0 measures nothing, since rows of layer 0 depend on the token alone: use"
                " method.check=1 or more"
            )

    def count(self, tokens: int) -> int:
        """Return how many of a unit's tokens are recomputed."""
        return -(-self.share.numerator * tokens // self.share.denominator)


def parsed(written: str | float) -> Fraction:
    """Return a share as an exact fraction; UserError unless it is at least 10^-6 and at most 1."""
    text = str(written).strip()
    number, per = (text[:-1], 100) if text.endswith("%") else (text, 1)
    try:
        found = Fraction(0) if _FAR.search(number) else Fraction(number) / per
    except (ValueError, ZeroDivisionError):
        raise UserError(f"method.recompute={text} is no share: write 0.1, 10% or 1/10") from None
    if not LEAST <= found <= 1:
        raise UserError(
            f"method.recompute={text} is not possible: write a share above 0 (1e-6 or more) and at most 1,"
            " such as 0.1, or take method=reposition, which recomputes nothing"
        )
    return found


def shown(share: Fraction) -> str:
    """Return a share in the shortest way that is exact: 0.1, or 1/3."""
    decimal = f"{float(share)!r}".removesuffix(".0")
    return decimal if Fraction(decimal) == share else str(share)
