"""SnapKV: the latest queries say which of the rows before them matter, each with its neighbours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from kvexp.errors import UserError
from kvexp.methods.eviction.base import EvictionMethod

if TYPE_CHECKING:
    from torch import Tensor

    from kvexp.methods.eviction.view import View


@dataclass(frozen=True)
class SnapKV(EvictionMethod):
    """Keep the rows that get most attention from the last `window` queries, smoothed, and the window's rows.

    Source: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (2024, arXiv
    2404.14469). Defaults are those of the LongBench configurations in its repository, where budgets are 1024,
    2048 and 4096.

    `window`: latest queries that score; their rows are always kept.
    `kernel`, `pool`: the score of a row becomes the average or maximum of `kernel` rows around it. Rows of
        the window and pads are not among them; beyond the ends stand zeros.
    `softmax`: over all rows that a query sees, and a learned sink of the model with them; or over the `past`,
        the rows before the window, alone, as the repositories below do, also for models with sinks.
    `merge`: when the query heads of a KV head become one by `group`: the pooled `scores`, the `attention`
        before it is pooled, or the `logits` before the softmax.

    Variants that have been run under this name, as knobs (what is not named keeps its default):
        the repository's class: window=64 kernel=5 pool=avg, budget=320
        kvpress: window=64 kernel=5 pool=avg
        KVCache-Factory's LongBench script: window=8
        the scorer inside Ada-KV for grouped queries: merge=attention
        the decoding baseline of R-KV and TriAttention: window=8 softmax=past merge=logits group=max
            interval=128 trigger=length

    Departures: the paper selects for each query head, which stores a row once for every query head that
    wants it; here a KV head selects once. Scores stay float32 where the repositories round them to the
    model's type. With an `interval` the window slides on while decoding.
    """

    id: ClassVar[str] = "snapkv"
    by_head: ClassVar[bool] = True
    paper: ClassVar[str] = "SnapKV: LLM Knows What You are Looking for Before Generation"
    year: ClassVar[str] = "2024"
    reads: ClassVar[tuple[str, ...]] = ("window queries",)

    window: int = 32
    kernel: int = 7
    pool: Literal["avg", "max"] = "max"
    softmax: Literal["all", "past"] = "all"
    merge: Literal["scores", "attention", "logits"] = "scores"

    def __post_init__(self) -> None:
        """Refuse a window without queries and a kernel without a middle."""
        super().__post_init__()
        if self.window < 1:
            raise UserError(f"method.window={self.window} holds no query: use 1 or more")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise UserError(f"method.kernel={self.kernel} has no middle: use an odd number, 1 for no pooling")

    @property
    def window_size(self) -> int:
        """How many of the latest queries score."""
        return self.window

    def smallest_budget(self) -> int:
        """Return the fewest rows that leave one beside the sinks, the window and the recent rows."""
        return self.sinks + max(self.recent, self.window) + 1

    def always(self, view: View) -> Tensor | None:
        """Return the rows that are kept before any other: those of the window too."""
        return EvictionMethod.always(replace(self, recent=max(self.recent, self.window)), view)

    def score(self, view: View) -> Tensor:
        """Return the pooled mean attention of the window's queries, [B, Hq or H, S]; 0 for their own rows."""
        from kvexp.cache.rows import over_heads
        from kvexp.methods.eviction.pooling import pooled
        from kvexp.methods.eviction.selection import over_group

        past = view.positions < (view.next_position - self.window)[:, None, None]
        past = past if view.valid is None else past & view.valid
        logits = view.window_logits()
        if self.merge == "logits":
            logits = over_group(logits, view.heads, self.group)
        if self.softmax == "past":
            logits = logits.masked_fill(~over_heads(past, logits.shape[1])[:, :, None], float("-inf"))
        real = view.window.real.to(logits.dtype)[:, None, :, None]
        if self.softmax == "all":  # as the model weighs: with learned sinks, which cancel over a part of rows
            attention = view.softmax(logits, self.group)
        else:
            attention = logits.softmax(-1).nan_to_num(0.0)
        attention = attention * real  # a query of a short text may see nothing
        attention = attention.sum(2) / real.sum(2).clamp(min=1)
        if self.merge == "attention":
            attention = over_group(attention, view.heads, self.group)
        return pooled(attention, over_heads(past, attention.shape[1]), self.kernel, self.pool)
