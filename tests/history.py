"""A sequence fed to a cache layer by hand, with everything kept for comparison."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from kvexp.attention.function import Call, Padding
from kvexp.cache.dense import DenseLayer

HEADS, GROUPS, WIDTH = 2, 2, 4


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Seeded random numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass
class History:
    """A sequence as a layer gets it, chunk by chunk, with all rows kept for comparison.

    Columns are true where a token is real; positions count real tokens only.
    """

    columns: torch.Tensor  # [B, all tokens]
    window: int | None = None
    seed: int = 0
    forgotten: list[int] = field(default_factory=list)  # slots that were compacted away
    at: int = 0

    def __post_init__(self) -> None:
        batch, length = self.columns.shape
        self.keys, self.values = (numbers(batch, HEADS, length, WIDTH, seed=self.seed + i) for i in (1, 2))
        self.queries = numbers(batch, HEADS * GROUPS, length, WIDTH, seed=self.seed + 3)
        self.positions = (self.columns.cumsum(1) - 1).clamp(min=0)

    def call(self, key: torch.Tensor, value: torch.Tensor, span: slice, **changes: Any) -> Call:
        """The attention call of the tokens at `span`, with `key` and `value` as the layer returned them."""
        columns = self.columns[:, : span.stop]
        known: dict[str, Any] = {
            "module": nn.Identity(),
            "query": self.queries[:, :, span],
            "key": key,
            "value": value,
            "scale": 0.7,
            "window": None,
            "padding": Padding(None if columns.all() else columns),
            "query_pre": None,
            "needs_lse": False,
        }
        return Call(**(known | changes))

    def feed(self, layer: DenseLayer, count: int, batch: int | None = None, **changes: Any) -> torch.Tensor:
        """Give the next tokens to the layer (only the first `batch` sequences); return its output."""
        span = slice(self.at, self.at + count)
        keywords: dict[str, Any] = {"position_ids": self.positions[:batch, span]}
        key, value = layer.update(self.keys[:batch, :, span], self.values[:batch, :, span], kwargs=keywords)
        assert keywords["kvexp"] is layer
        call = self.call(key, value, span, query=self.queries[:batch, :, span], **changes)
        output, _ = layer.attend(call)
        layer.after(call)
        self.at = span.stop
        return output

    def visible(self, span: slice) -> torch.Tensor:
        """Which slots the queries at `span` see, [B, T, slots]; a pad sees itself."""
        slots = torch.arange(span.stop)
        seen = slots[None, None] <= slots[span][None, :, None]
        if self.window is not None:
            distance = self.positions[:, span, None] - self.positions[:, None, : span.stop]
            seen = seen & (distance < self.window)
        seen = seen & self.columns[:, None, : span.stop]
        seen = seen | (slots[None, None] == slots[span][None, :, None])
        return seen & ~torch.isin(slots, torch.tensor(self.forgotten))

    def expected(self, count: int) -> torch.Tensor:
        """The output for the latest `count` tokens, over all that they may see."""
        span = slice(self.at - count, self.at)
        keys, values = (x[:, :, : self.at].repeat_interleave(GROUPS, 1) for x in (self.keys, self.values))
        scores = self.queries[:, :, span] @ keys.mT * 0.7
        return scores.masked_fill(~self.visible(span)[:, None], -torch.inf).softmax(-1) @ values

    def check(self, layer: DenseLayer, count: int, **changes: Any) -> None:
        """Feed the next tokens and compare the output of the real ones."""
        output = self.feed(layer, count, **changes)
        real = self.columns[:, self.at - count : self.at]
        expected = self.expected(count).transpose(1, 2)[real]
        torch.testing.assert_close(output.transpose(1, 2)[real], expected, atol=1e-10, rtol=1e-8)


def padded(pads: list[int], before: int, query: int, after: int) -> torch.Tensor:
    """Columns of a context, queries of unequal lengths (padded on the left) and what is generated."""
    columns = torch.ones(len(pads), before + query + after, dtype=torch.bool)
    for row, count in enumerate(pads):
        columns[row, before : before + count] = False
    return columns


@st.composite
def schedules(draw: Any) -> tuple[torch.Tensor, list[int]]:
    """Columns with pads between context and query, and the chunks in which the tokens come."""
    before, query, after = draw(st.integers(0, 20)), draw(st.integers(1, 6)), draw(st.integers(0, 12))
    pads = draw(st.lists(st.integers(0, query - 1), min_size=1, max_size=3))
    pads[0] = 0  # the longest query has none
    chunks = []
    left = before
    while left:
        chunks.append(draw(st.integers(1, left)))
        left -= chunks[-1]
    return padded(pads, before, query, after), [*chunks, query, *[1] * after]
