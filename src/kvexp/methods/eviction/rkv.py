"""R-KV: keep what is attended to and not said twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvexp.errors import UserError
from kvexp.methods.eviction.snapkv import SnapKV

if TYPE_CHECKING:
    from torch import Tensor

    from kvexp.methods.eviction.view import View


@dataclass(frozen=True)
class RKV(SnapKV):
    """Weigh the attention of the latest queries against how similar a key is to the other keys.

    Source: Cai et al., "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models" (2025, arXiv
    2505.24133). With I the score of SnapKV as it is used while decoding (the largest logit of the query heads
    of a KV head, softmax over the rows before the window, mean over its queries, maximum over `kernel`
    neighbours) and R the softmax over all rows of the mean cosine similarity of a key to the others,

        score = balance * I - (1 - balance) * R.

    `balance`: 0.1 is that of the baseline runs of TriAttention; R-KV's own is 0.07.
    `threshold`: of the rows that are more similar than this to some row, the latest is not made redundant by
        it. Similarity to itself never counts.

    Rows leave at every multiple of `interval` tokens, and when a prompt exceeds the budget; the prompt is not
    protected unless `protect_prompt` says so. Departures: heads are compared in float32, and a row that is
    similar to none spares none.
    """

    id: ClassVar[str] = "rkv"
    by_head: ClassVar[bool] = True
    paper: ClassVar[str] = "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models"
    year: ClassVar[str] = "2025"
    reads: ClassVar[tuple[str, ...]] = ("window queries", "keys")

    interval: int | None = 128
    trigger: Literal["slack", "length"] = "length"
    group: Literal["mean", "max"] = "max"
    window: int = 8
    kernel: int = 7
    pool: Literal["avg", "max"] = "max"
    softmax: Literal["all", "past"] = "past"
    merge: Literal["scores", "attention", "logits"] = "logits"
    balance: float = 0.1
    threshold: float = 0.5

    def __post_init__(self) -> None:
        """Refuse a balance that is no share."""
        super().__post_init__()
        if not 0 <= self.balance <= 1:
            raise UserError(
                f"method.balance={self.balance} is not possible: use 0 (redundancy) to 1 (attention)"
            )

    def score(self, view: View) -> Tensor:
        """Return attention less redundancy, [B, H, S]."""
        from kvexp.methods.eviction.redundancy import redundancy
        from kvexp.methods.eviction.selection import over_group

        importance = self.combine(super().score(view), view)
        keys = view.keys
        mask = view.mask(keys.shape[1])
        similar = redundancy(keys, mask, self.threshold)
        if mask is not None:
            similar = similar.masked_fill(~mask, float("-inf"))
        repeated = over_group(similar.softmax(-1).nan_to_num(0.0), view.heads, "mean")
        return self.balance * importance - (1 - self.balance) * repeated
