"""Queries that run together on one encoded context: score what follows, or continue.

The context's cache is forked, never changed. Queries are padded on the left; pads lie between context and
query, are masked, and move no position. After the first forward the batch can be extended again and again
from where it stands, each time on a fork of its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kvexp.attention.options import options_of
from kvexp.cache.kv_cache import KVCache
from kvexp.cache.source import Observer


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return the most likely tokens [B] of logits [B, V], ties to the lower id."""
    return logits.argmax(-1)


def _scores(logits: torch.Tensor) -> torch.Tensor:
    """Logits in float32, or float64 of a float64 model."""
    return logits if logits.dtype == torch.float64 else logits.float()


class QueryBatch:
    """B queries behind `context`; needs an attached model.

    A cache of one context serves all queries. One of several contexts serves query b on context `rows[b]`
    (default: one query for each context, in order).
    logits [B, V] float32: the distribution of the token after each query.
    """

    def __init__(
        self,
        model: Any,
        context: KVCache,
        queries: Sequence[Sequence[int]],
        rows: Sequence[int] | None = None,
    ) -> None:
        if not all(queries):
            raise ValueError("a query has no token: there is no distribution after nothing")
        self.model, self.queries = model, queries
        device = model.get_input_embeddings().weight.device
        width, seen = max(len(q) for q in queries), context.seen
        ids = torch.zeros(len(queries), width, dtype=torch.long, device=device)
        real = torch.zeros_like(ids, dtype=torch.bool)
        for row, query in enumerate(queries):
            ids[row, width - len(query) :] = torch.tensor(list(query), device=device)
            real[row, width - len(query) :] = True
        self.cache = context.fork()
        if rows is not None and context.batch > 1:
            self.cache.batch_select_indices(torch.tensor(list(rows)))
        before = self.cache.columns
        if before is None:
            before = real.new_ones(len(queries), seen)
        self.columns = torch.cat([before.to(device), real], dim=1)
        positions = self.columns.cumsum(1) - 1
        self.next_position = positions[:, -1:] + 1  # [B, 1]
        self.padded = not bool(self.columns.all())
        self.logits = self._forward(self.cache, ids, self._mask(self.columns), positions[:, seen:], 1)[:, -1]

    def _mask(self, columns: torch.Tensor, padded: bool = False) -> torch.Tensor | None:
        """Return no mask where nothing is padded, as `generate` does: then none has to be built."""
        return columns if self.padded or padded else None

    def _forward(
        self,
        cache: KVCache,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor,
        keep: int,
    ) -> torch.Tensor:
        with torch.no_grad():
            output = self.model(
                ids,
                cache=cache,
                attention_mask=mask,
                position_ids=positions.clamp(min=0),
                logits_to_keep=keep,
            )
        return _scores(output.logits)

    def extend(self, tokens: Sequence[Sequence[int]], observer: Observer | None = None) -> torch.Tensor:
        """Return logits [B, n, V] after each of n more tokens per query, where a row has as many.

        The batch itself stays where it was. `observer` sees the states of every full-attention layer.
        """
        device = self.columns.device
        width = max(len(row) for row in tokens)
        ids = torch.zeros(len(tokens), width, dtype=torch.long, device=device)
        real = torch.zeros_like(ids, dtype=torch.bool)
        for row, some in enumerate(tokens):
            ids[row, : len(some)] = torch.tensor(list(some), dtype=torch.long, device=device)
            real[row, : len(some)] = True
        columns = torch.cat([self.columns, real], dim=1)
        positions = self.next_position + torch.arange(width, device=device)
        cache = self.cache.fork()
        cache.observe(observer)
        mask = self._mask(columns, padded=any(len(row) < width for row in tokens))
        return self._forward(cache, ids, mask, positions, width)

    def answer_distributions(self, answers: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return for each query the log-probabilities [n, V] at its n teacher-forced answer tokens."""
        first = self.logits.log_softmax(-1)[:, None]  # [B, 1, V]
        if max(len(a) for a in answers) > 1:
            more = self.extend([list(a[:-1]) for a in answers]).log_softmax(-1)
            first = torch.cat([first, more], dim=1)
        return [rows[: len(answer)] for rows, answer in zip(first, answers, strict=True)]

    def _steps(self, compiled: bool) -> Callable[..., torch.Tensor]:
        """Return what takes a cache, tokens [B, 1], a mask and positions to logits [B, 1, V]."""
        if compiled:
            from kvexp.decode.compiled import compiled_steps

            steps = compiled_steps(self.model)
            if steps is not None:
                return lambda *step: _scores(steps(*step))
        return lambda cache, ids, mask, positions: self._forward(cache, ids, mask, positions, 1)

    def generate(
        self,
        max_new_tokens: int | Sequence[int],
        stopped: Callable[[list[int]], str | None],
        choose: Callable[[torch.Tensor], torch.Tensor] = greedy,
        stepped: Callable[[], AbstractContextManager[None]] = nullcontext,
        compiled: bool | None = None,
    ) -> tuple[list[list[int]], list[str]]:
        """Return continuations and why each ended: what `stopped(new ids)` said, or "length".

        `max_new_tokens` is one number, or one for each query. `choose` takes logits [B, V] to tokens [B].
        `stepped` is entered around each step of decoding, for timing. `compiled`: see `kvexp.decode`; None:
        as the model's options say.
        """
        count = len(self.queries)
        limits = [max_new_tokens] * count if isinstance(max_new_tokens, int) else list(max_new_tokens)
        made: list[list[int]] = [[] for _ in range(count)]
        ends: list[str | None] = [None] * count
        cache, columns, logits = self.cache.fork(), self.columns, self.logits
        forward = self._steps(options_of(self.model).compiled if compiled is None else compiled)
        for step in range(max(limits)):
            token = choose(logits)  # [B]
            for row, value in enumerate(token.tolist()):
                if ends[row] is None:
                    made[row].append(value)
                    ends[row] = stopped(made[row]) or ("length" if len(made[row]) >= limits[row] else None)
            if all(ends):
                break
            if self.padded:
                columns = torch.cat([columns, columns.new_ones(count, 1)], dim=1)
            mask, positions = self._mask(columns), self.next_position + step
            if cache.evictor is not None:  # sequences that have ended go on, and count no more
                cache.evictor.tally.alive = [end is None for end in ends]
            with stepped():
                logits = forward(cache, token[:, None], mask, positions)[:, -1]
        return made, [end or "length" for end in ends]
