"""What a method sees of one layer when it scores: rows, queries, probabilities; pads are told apart."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from kvexp.attention import sinks
from kvexp.attention.function import Call
from kvexp.cache.evicting import EvictingLayer
from kvexp.cache.rows import expanded, over_heads
from kvexp.cache.window import Window
from kvexp.methods.eviction.selection import over_group

if TYPE_CHECKING:
    from kvexp.methods.eviction.evictor import MethodEvictor

BLOCK = 256  # queries whose scores stand in memory at once


class View:
    """One layer at one moment. H are the KV heads that the cache stores, Hk those that attention reads.

    The two differ in multi-head latent attention alone, where one latent row (H = 1) serves all heads. Hq are
    the query heads; head h of Hq reads head h // (Hq / Hk). Masked entries of a result are 0 or -inf as said.
    """

    def __init__(self, layer: EvictingLayer, call: Call, evictor: MethodEvictor, index: int) -> None:
        self.layer, self.call, self.evictor = layer, call, evictor
        self.index = index  # of the layer, among those that evict
        self.n_layers = len(evictor.layers)
        self.memory: Any = evictor.memory  # what `prepare` left
        self.scale = call.scale

    def track(self, name: str) -> torch.Tensor:
        """Return what the method noted of each row, [B, H, S] float32; 0 for rows that it has not seen."""
        notes = self.layer.held().tracks
        if name in notes:
            return notes[name]
        return torch.zeros(self.layer.keys.shape[:3], dtype=torch.float32, device=self.layer.keys.device)

    def note(self, name: str, values: torch.Tensor) -> None:
        """Keep `values` [B, H, S] with the rows: they follow each row, and leave with it."""
        self.layer.tracks[name] = values

    def recall(self, name: str) -> torch.Tensor | None:
        """Return what the method remembered of each sequence, [1 or B, ...], or None."""
        return self.layer.remembered.get(name)

    def remember(self, name: str, values: torch.Tensor | None) -> None:
        """Keep `values` [1 or B, ...] with the layer and its forks, which share them; None forgets them."""
        if values is None:
            self.layer.remembered.pop(name, None)
        else:
            self.layer.remembered[name] = values

    @property
    def model(self) -> Any:
        """The model whose cache this is, for its rotary table."""
        return self.evictor.model

    @cached_property
    def _expanded(self) -> tuple[torch.Tensor, torch.Tensor]:
        return expanded(self.call.module, self.layer.keys, self.layer.values)

    @property
    def keys(self) -> torch.Tensor:
        """Rotated keys of all rows, [B, Hk, S, D]."""
        return self._expanded[0]

    @property
    def values(self) -> torch.Tensor:
        """Values of all rows, [B, Hk, S, Dv]."""
        return self._expanded[1]

    @property
    def heads(self) -> int:
        """H, the KV heads that the cache stores and that rows are selected for."""
        return self.layer.keys.shape[1]

    @property
    def positions(self) -> torch.Tensor:
        """True positions of the rows, [B, H, S] int32."""
        return self.layer.held().positions

    @property
    def valid(self) -> torch.Tensor | None:
        """Rows that count, [B, H, S] bool, or None when all do."""
        return self.layer.valid

    @property
    def next_position(self) -> torch.Tensor:
        """The position of the token that comes next, [1 or B]: the number of tokens seen."""
        return self.layer.next_position

    @property
    def length(self) -> list[int]:
        """Rows that a KV head holds now, the mean over heads, for each sequence."""
        return [total // self.heads for total in self.evictor.tally.totals[self.index]]

    @property
    def window(self) -> Window:
        """The latest real queries: queries [B, Hq, w, D], slots [B, w], real [B, w]."""
        assert self.layer.queries is not None, "a method that reads queries says so in `window_size`"
        return self.layer.queries.last(self.evictor.method.during(self.evictor.phase).window_size)

    def mask(self, heads: int) -> torch.Tensor | None:
        """Return `valid` for `heads` heads, None when all rows count."""
        return None if self.valid is None else over_heads(self.valid, heads)

    def window_logits(self) -> torch.Tensor:
        """Return scaled scores of the window's queries, [B, Hq, w, S] float32, -inf where not visible."""
        window = self.window
        scores = self._scores(window.queries)
        hidden = self.layer.held().slots[:, :, None, :] > window.slots[:, None, :, None]
        scores = scores.masked_fill(over_heads(hidden, scores.shape[1]), -torch.inf)
        mask = self.mask(scores.shape[1])
        return scores if mask is None else scores.masked_fill(~mask[:, :, None, :], -torch.inf)

    def softmax(self, logits: torch.Tensor, group: str = "mean") -> torch.Tensor:
        """Return the softmax of scaled scores [B, Hq, T, S]; 0 for a query that sees nothing.

        A learned sink of the model takes its share, as in the model's own softmax. Scores of KV heads, made
        of those of their query heads by `group`, meet sinks made in the same way.
        """
        found = self.call.sinks
        if found is not None:
            found = over_group(found[None, :, None], logits.shape[1], group)[0, :, 0]
        return sinks.softmax(logits, found)

    def window_probabilities(self) -> torch.Tensor:
        """Return the softmax of `window_logits`, [B, Hq, w, S]; rows of queries that do not exist are 0."""
        return self.softmax(self.window_logits()) * self.window.real[:, None, :, None]

    def attention_sums(self, last: int | None = None) -> torch.Tensor:
        """Return the attention that each row got from the queries of this forward, summed, [B, Hq, S].

        `last`: from the last so many real queries of each sequence only. Needs a method that `observes`. Runs
        over blocks of queries with the log-sum-exp that attention left, so no T x S matrix is ever held.
        """
        call, layer = self.call, self.layer
        assert layer.lse is not None, "a method that reads probabilities says so in `observes`"
        lse = sinks.joined(layer.lse, call.sinks)
        counted = self._counted_queries(last)
        visible = layer.visible(call)
        length = call.query.shape[2]
        total: torch.Tensor | None = None
        for at in range(0, length, BLOCK):
            part = slice(at, at + BLOCK)
            scores = self._scores(call.query[:, :, part])
            probabilities = (scores - lse[:, :, part, None]).exp()
            if visible is not None:
                seen = over_heads(visible[:, :, part], scores.shape[1])
                probabilities = probabilities.masked_fill(~seen, 0.0)
            if counted is not None:
                probabilities = probabilities * counted[:, None, part, None]
            summed = probabilities.sum(2)
            total = summed if total is None else total + summed
        assert total is not None
        mask = self.mask(total.shape[1])
        return total if mask is None else total.masked_fill(~mask, 0.0)

    def _counted_queries(self, last: int | None) -> torch.Tensor | None:
        """Which queries of this forward count, [B or 1, T]; None when all do."""
        length = self.call.query.shape[2]
        slots = self.layer.q_slots
        real = self.call.padding.at(slots) if self.call.padding.pads(int(slots[0]), self.layer.seen) else None
        if real is None:
            if last is None or last >= length:
                return None
            return (torch.arange(length, device=slots.device) >= length - last)[None]
        if last is None:
            return real
        behind = real.flip(1).cumsum(1).flip(1)  # real queries from here to the end
        return real & (behind <= last)

    def _scores(self, queries: torch.Tensor) -> torch.Tensor:
        """Scaled scores [B, Hq, T, S] of rotated queries, float32 at least."""
        keys = self.keys
        dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
        batch, heads, length, width = queries.shape
        group = heads // keys.shape[1]
        folded = queries.to(dtype).reshape(batch, keys.shape[1], group * length, width)
        scores = folded @ keys.to(dtype).transpose(-1, -2) * self.scale
        return scores.view(batch, heads, length, -1)
