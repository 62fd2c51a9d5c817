"""Expected attention: what queries to come will attend to, if they are distributed like those so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvexp.errors import UserError
from kvexp.methods.eviction.base import EvictionMethod

if TYPE_CHECKING:
    from torch import Tensor

    from kvexp.methods.eviction.gaussian import Gaussian
    from kvexp.methods.eviction.view import View

_NAMES = ("query_count", "query_mean", "query_scatter")


@dataclass(frozen=True)
class ExpectedAttention(EvictionMethod):
    """Keep the rows that Gaussian queries at the next positions attend to most, times the norm of the value.

    Source: Devoto et al., "Expected Attention: KV Cache Compression by Estimating Attention from Future
    Queries Distribution" (2025, arXiv 2510.00636), with the defaults of kvpress. Queries before RoPE have
    a mean m and a covariance C over the context, in each query head; R is the mean rotation of the next
    `future` positions. With mu = R m and V = R C R' the logit of key k is

        scale mu k + scale^2 k V k / 2,

    the log of what a Gaussian query gives on average; then softmax over rows, mean over the query heads of a
    KV head, times the L2 norm of the value.

    The first `sinks` tokens are always kept; neither their queries nor their keys count. `covariance=false`
    and `value_norm=false` leave out V and the norm. The epsilon that kvpress can add to the softmax, 0 by
    default, is left out, as are learned sinks of a model. While decoding (`interval`), statistics go on over
    every token seen, where kvpress remembers the latest alone; with interval=null they end with the last
    compression.
    """

    id: ClassVar[str] = "expected_attention"
    paper: ClassVar[str] = (
        "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution"
    )
    year: ClassVar[str] = "2025"
    reads: ClassVar[tuple[str, ...]] = ("query statistics", "keys", "values")
    taps: ClassVar[bool] = True
    follows: ClassVar[bool] = True

    sinks: int = 4
    future: int = 512
    covariance: bool = True
    value_norm: bool = True

    def __post_init__(self) -> None:
        """Refuse a future without positions."""
        super().__post_init__()
        if self.future < 1:
            raise UserError(f"method.future={self.future} is no number of positions: use 1 or more")

    def observe(self, view: View) -> None:
        """Count the queries of a forward, as long as a compression is still to come."""
        from kvexp.methods.eviction.gaussian import measured

        if view.evictor.phase == "decode" and not _goes_on(view):
            self._note(view, None)
            return
        query, layer = view.call.query_pre, view.layer
        assert query is not None
        counted = layer.q_positions >= self.sinks
        real = view.call.padding.at(layer.q_slots)
        if real is not None:
            counted = counted & real
        seen, before = measured(query, counted.expand(query.shape[0], -1)), self._queries(view)
        self._note(view, seen if before is None else before.merged(seen))

    def score(self, view: View) -> Tensor:
        """Return the expected attention of each row times the norm of its value, [B, Hk, S]."""
        import torch

        from kvexp.attention.bands import bands
        from kvexp.cache.rows import over_heads
        from kvexp.methods.eviction.gaussian import expected_logits, upcoming
        from kvexp.methods.eviction.selection import over_group

        queries = self._queries(view)
        assert queries is not None
        spectrum = bands(view.model, view.call.layer_index)
        mean, spread = upcoming(queries, spectrum, view.next_position, self.future)
        logits = expected_logits(view.keys, mean, spread if self.covariance else None, view.scale)
        counts = view.positions >= self.sinks
        counts = counts if view.valid is None else counts & view.valid
        logits = logits.masked_fill(~over_heads(counts, logits.shape[1]), -torch.inf)
        attention = over_group(logits.softmax(-1).nan_to_num(0.0), view.keys.shape[1], self.group)
        if not self.value_norm:
            return attention
        return attention * torch.linalg.vector_norm(view.values.to(attention.dtype), dim=-1)

    def evicted(self, view: View) -> None:
        """Forget the queries where no compression is to come."""
        if not _goes_on(view) and (view.evictor.phase != "prefill" or view.evictor.closing):
            self._note(view, None)

    def _queries(self, view: View) -> Gaussian | None:
        from kvexp.methods.eviction.gaussian import Gaussian

        found = [view.recall(name) for name in _NAMES]
        return None if found[0] is None else Gaussian(*found)  # type: ignore[arg-type]

    def _note(self, view: View, queries: Gaussian | None) -> None:
        values = (None,) * 3 if queries is None else (queries.count, queries.mean, queries.scatter)
        for name, value in zip(_NAMES, values, strict=True):
            view.remember(name, value)


def _goes_on(view: View) -> bool:
    """Whether queries are wanted while decoding, by this method or by one that it scores for."""
    method = view.evictor.method.during("decode")
    return method.follows and method.interval is not None
