"""How many rows each layer holds and how many tokens it has seen, sequence by sequence, in plain numbers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

Number = TypeVar("Number", int, bool)


class Tally:
    """Counts for the layers that evict (`place` among them) and the sequences of a batch, without pads."""

    def __init__(self, layers: int) -> None:
        self.totals = [[0] for _ in range(layers)]  # rows of all heads together
        self.tokens = [[0] for _ in range(layers)]  # seen so far
        self.compressed = [[False] for _ in range(layers)]  # whether rows left while decoding
        self.latest: list[int] = []  # tokens that this forward brought, of each sequence
        self.alive: list[bool] | None = None  # sequences that still count; None: all

    def fork(self) -> Tally:
        """Return a tally in the same state."""
        twin = copy.copy(self)
        twin.totals = [list(totals) for totals in self.totals]
        twin.tokens = [list(tokens) for tokens in self.tokens]
        twin.compressed = [list(compressed) for compressed in self.compressed]
        return twin

    def select(self, chosen: Sequence[int]) -> None:
        """Follow a cache to the sequences `chosen` of its batch."""
        self.totals, self.tokens = _followed(self.totals, chosen), _followed(self.tokens, chosen)
        self.compressed, self.alive = _followed(self.compressed, chosen), None

    def arrive(self, place: int, heads: int, real: list[int]) -> None:
        """Count the tokens that a forward brings to each sequence of a layer."""
        totals, tokens = self.totals[place], self.tokens[place]
        if len(totals) != len(real):
            totals, tokens = totals * len(real), tokens * len(real)
            self.compressed[place] = self.compressed[place] * len(real)
        self.totals[place] = [old + heads * new for old, new in zip(totals, real, strict=True)]
        self.tokens[place] = [old + new for old, new in zip(tokens, real, strict=True)]
        self.latest = real

    def leave(self, place: int, kept: list[int]) -> int:
        """Note how many rows each sequence of a layer still has; return how many left."""
        gone = sum(self._counted(self.totals[place])) - sum(self._counted(kept))
        self.totals[place] = kept
        return gone

    def rows(self, place: int, heads: int) -> int:
        """Return the rows per KV head that the fullest sequence has in a layer, rounded up."""
        return -(-max(self._counted(self.totals[place])) // heads)

    def _counted(self, values: list[int]) -> list[int]:
        """Return the values of sequences that still count, of one for each."""
        if self.alive is None:
            return values
        return [value for value, alive in zip(values, self.alive, strict=True) if alive]


def _followed(known: list[list[Number]], chosen: Sequence[int]) -> list[list[Number]]:
    return [[one[i] for i in chosen] if len(one) > 1 else one * len(chosen) for one in known]
