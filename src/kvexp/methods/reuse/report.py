"""What a reuse method really did to a batch of contexts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Report:
    """Counts over the reusable tokens (those of units) of a batch; `layers` numbers in each list.

    computed: tokens whose keys and values were computed in each layer, also only to choose among them.
    written: tokens that ended with fresh keys or values in each layer; all others are reused.
    union: tokens that were chosen, whatever they were chosen for (probes of keys and of values).
    question_rows: rows times layers of the questions that were run to choose tokens.
    moved_bytes: bytes of the chunks that were placed, as they are stored (packed, where the store packs).
    seconds: wall time of placing and repairing, store_seconds: that of encoding units which the store did not
    hold. hits, misses: chunks of units that the store held, and that were encoded, among those that were
    placed: headers, and look-ups of which nothing was placed, are in neither. found: tokens of the hits.
    """

    layers: int
    tokens: int
    union: int = 0
    question_rows: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0
    store_seconds: float = 0.0
    hits: int = 0
    misses: int = 0
    found: int = 0
    computed: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Nothing done yet."""
        self.computed, self.written = [0] * self.layers, [0] * self.layers

    @property
    def share(self) -> float:
        """Positions computed, over all layers, as a share of the reusable ones."""
        return sum(self.computed) / (self.layers * self.tokens) if self.tokens else 0.0

    @property
    def union_share(self) -> float:
        """Chosen tokens as a share of the reusable ones."""
        return self.union / self.tokens if self.tokens else 0.0

    @property
    def check_rows(self) -> int:
        """Tokens times layers computed beyond the chosen ones: the price of choosing by a check layer."""
        return sum(max(0, count - self.union) for count in self.computed)

    def counters(self) -> dict[str, int]:
        """Return what adds up over contexts; `recomputed` and `reused` are tokens times layers."""
        return {
            "reused": sum(self.tokens - count for count in self.written),
            "recomputed": sum(self.computed),
            "reusable": self.layers * self.tokens,
            "unit_tokens": self.tokens,
            "union": self.union,
            "check_rows": self.check_rows,
            "question_rows": self.question_rows,
            "moved_bytes": self.moved_bytes,
            "store_hits": self.hits,
            "store_misses": self.misses,
            "found": self.found,
        }
