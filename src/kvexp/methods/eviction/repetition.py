"""What KVzip does: a context is read once, repeated chunk by chunk on forks, and then compressed at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvexp.attention.function import Call
from kvexp.attention.options import options_of
from kvexp.attention.sinks import softmax
from kvexp.budget import Budget
from kvexp.cache.evicting import EvictingLayer
from kvexp.cache.kv_cache import KVCache, prefill
from kvexp.cache.rows import KeptRows, expanded, over_heads
from kvexp.errors import UserError
from kvexp.methods.base import several
from kvexp.methods.eviction.caches import evicting_cache
from kvexp.methods.eviction.evictor import MethodEvictor
from kvexp.methods.eviction.score_store import Scores, ScoreStore
from kvexp.methods.eviction.selection import over_group
from kvexp.prompt import Context

if TYPE_CHECKING:
    from kvexp.methods.eviction.kvzip import KVzip

TAIL = 8  # tokens of the chunk before that lead into the next one
BLOCK = 256  # queries whose scores stand in memory at once


def encode(
    method: KVzip,
    model: Any,
    context: Context | Sequence[int] | Sequence[Context],
    memory: Any,
    budget: Budget | int | str | None,
) -> KVCache:
    """Return a compressed cache of one context, or of several as one batch."""
    contexts = [Context.of(one) for one in several(context)]
    if not all(len(one) for one in contexts):
        raise UserError("kvzip has no context to repeat: encode the prompt first, or take method=snapkv")
    longest = max(map(len, contexts))
    budget = Budget(None) if budget is None else Budget.parse(budget, longest)
    method.check_budget(budget)
    firsts = [max(len(one.header), method.sinks) for one in contexts]  # rows that always stay
    tight = budget.rows is not None and budget.rows < longest
    if tight:
        _check_room(method, budget, firsts)
    evictor = MethodEvictor(method, budget.rows, None, model=model)
    cache = evicting_cache(model, evictor)
    with method.attach(model):
        prefill(model, [one.ids for one in contexts], cache, lambda last: evictor.reading(last=False))
        if tight:
            assert budget.rows is not None
            scores = protect(scored(method, model, contexts, cache, memory), cache, firsts, method.recent)
            evictor.compress(scores, shares(scores, budget.rows, method.level))
    evictor.read()
    return cache


def _check_room(method: KVzip, budget: Budget, firsts: Sequence[int]) -> None:
    least = max(firsts) + method.recent + 1
    if budget.rows is not None and budget.rows < least:
        raise UserError(
            f"budget={budget} leaves kvzip nothing to choose beside the header, sinks and recent rows that it"
            f" always keeps: use budget={least} or more"
        )


def scored(
    method: KVzip, model: Any, contexts: Sequence[Context], cache: KVCache, store: ScoreStore | None
) -> list[torch.Tensor]:
    """Return the scores of `repeated`, from the store where another budget has left them there."""

    def make() -> Scores:
        reader = Reader(cache, method.group)
        return Scores(repeated(method, model, contexts, cache, reader), reader.most_rows, reader.most_bytes)

    if store is None:
        return make().layers
    options = options_of(model)
    facts = {
        "contexts": [one.key for one in contexts],
        "headers": [len(one.header) for one in contexts],
        **{name: getattr(method, name) for name in ("group", "chunk", "sinks", "repeat")},
        "dtype": str(model.dtype),
        "options": [options.backend, options.prefill_chunk],
    }
    found, before = store.get(facts, make)
    if before:
        cache.counters["scores_found"] = cache.counters.get("scores_found", 0) + 1
        assert cache.evictor is not None
        cache.evictor.meter.hold(found.rows, prompt=True)
        cache.evictor.meter.weigh(found.bytes, prompt=True)
    layers = _evicting(cache)
    return [one.to(layer.keys.device) for one, layer in zip(found.layers, layers, strict=True)]


@torch.no_grad()
def repeated(
    method: KVzip, model: Any, contexts: Sequence[Context], cache: KVCache, reader: Reader | None = None
) -> list[torch.Tensor]:
    """Return the scores [B, H, S] of all rows of each full-attention layer, of use behind the header only.

    Needs an attached model and a cache that has read `contexts` and nothing more, which stays as it is.
    """
    reader = reader or Reader(cache, method.group)
    chunks = [range(len(one.header), len(one), method.chunk) for one in contexts]
    for number in range(max(map(len, chunks))):
        texts: list[list[int]] = []
        columns: list[list[int]] = []
        for one, starts in zip(contexts, chunks, strict=True):
            if number >= len(starts):  # a shorter context has no such chunk
                texts.append([])
                columns.append([])
                continue
            start, end = starts[number], min(starts[number] + method.chunk, len(one))
            lead = one.header if isinstance(method.repeat, str) else method.repeat
            before = max(start - min(TAIL, method.chunk), len(one.header))
            texts.append([*lead, *one.ids[before:end]])
            seen = {*range(min(method.sinks, len(one))), *range(start, end)}
            columns.append([cache.seen - len(one) + place for place in sorted(seen)])
        reader.repeat(model, cache, texts, columns)
    return [reader.scores[layer.index] for layer in reader.layers]


class Reader:
    """The evictor of forks on which chunks are repeated: nothing leaves, weights are read and kept."""

    wants_lse = False
    wants_rows = False

    def __init__(self, cache: KVCache, group: str) -> None:
        self.group = group
        self.layers = _evicting(cache)
        self.most_rows = self.most_bytes = 0  # that were held
        self.scores: dict[int, torch.Tensor] = {}
        for layer in self.layers:
            dtype = torch.float64 if layer.keys.dtype == torch.float64 else torch.float32
            self.scores[layer.index] = torch.zeros(
                layer.keys.shape[:3], dtype=dtype, device=layer.keys.device
            )

    def repeat(
        self, model: Any, cache: KVCache, texts: list[list[int]], columns: Sequence[Sequence[int]]
    ) -> None:
        """Feed `texts` [B] behind a fork; score the rows that stand at `columns` [B] of the cache."""
        device = model.get_input_embeddings().weight.device
        tokens, real = _padded(texts, device)
        self.columns, self.counted = _padded(columns, device)
        before = cache.columns
        before = real.new_ones(len(texts), cache.seen) if before is None else before.to(device)
        seen_columns = torch.cat([before, real], dim=1)
        positions = (seen_columns.cumsum(1) - 1).clamp(min=0)
        pads = not bool(seen_columns.all())
        fork = cache.fork()
        layers = _evicting(fork)
        for layer in layers:
            layer.evictor = self
        chunk = options_of(model).prefill_chunk
        for at in range(0, tokens.shape[1], chunk):
            start, end = fork.seen, fork.seen + tokens[:, at : at + chunk].shape[1]
            model(
                tokens[:, at : at + chunk],
                cache=fork,
                attention_mask=seen_columns[:, :end] if pads else None,
                position_ids=positions[:, start:end],
                logits_to_keep=1,
            )
            self.most_rows = max(self.most_rows, *(layer.entries() for layer in layers))
            self.most_bytes = max(self.most_bytes, fork.sequence_bytes())
            cache.evictor.meter.hold(self.most_rows, prompt=True)
            cache.evictor.meter.weigh(self.most_bytes, prompt=True)

    def after(self, layer: EvictingLayer, call: Call) -> None:
        """Note the largest weights that the queries of this forward give to the rows being repeated."""
        [context] = layer.sources
        assert isinstance(context, KeptRows)
        columns, counted = (x.to(layer.keys.device) for x in (self.columns, self.counted))
        heads, width = layer.keys.shape[1], columns.shape[1]
        keys, values = (
            torch.cat([old.gather(2, _by_head(columns, old)), own], dim=2)
            for old, own in ((context.rows.keys, layer.keys), (context.rows.values, layer.values))
        )
        keys, _ = expanded(call.module, keys, values)
        visible = _visible(layer, call, counted)
        real = call.padding.at(layer.q_slots)
        best = self.scores[layer.index].new_zeros(call.query.shape[0], call.query.shape[1], width)
        for at in range(0, call.query.shape[2], BLOCK):
            part = slice(at, at + BLOCK)
            seen = over_heads(visible[:, :, part], call.query.shape[1])
            weights = _weights(call.query[:, :, part], keys, call.scale, seen, call.sinks)[..., :width]
            if real is not None:
                weights = weights * real[:, None, part, None]
            best = torch.maximum(best, weights.amax(2))
        best = over_group(best, heads, self.group)
        # Entries that only fill a shorter list up weigh nothing, and so change no score of theirs.
        self.scores[layer.index].scatter_reduce_(2, columns[:, None].expand(-1, heads, -1), best, "amax")


def protect(
    scores: Sequence[torch.Tensor], cache: KVCache, firsts: Sequence[int], recent: int
) -> list[torch.Tensor]:
    """Return scores with inf for rows that always stay and -inf for pads."""
    pads = [0] * len(firsts) if cache.columns is None else (~cache.columns).sum(1).tolist()
    slots = torch.arange(cache.seen)
    positions = slots - torch.tensor(pads)[:, None]
    always = (positions < torch.tensor(firsts)[:, None]) | (slots >= cache.seen - recent)
    absent = positions < 0
    fixed = torch.zeros(positions.shape).masked_fill(always, torch.inf).masked_fill(absent, -torch.inf)
    return [one + fixed[:, None].to(one.device) for one in scores]


def shares(scores: Sequence[torch.Tensor], rows: int, level: str) -> list[list[list[int]]]:
    """Return how many rows each head keeps, [layer][sequence][head], of scores [B, H, S] of each layer.

    `head`: `rows` for each. `layer`, `pair`: as many as it has among the best of its layer, or of all layers,
    `rows` times the heads that compete; ties go to the lower layer, then head, then row. A sequence of at
    most `rows` rows keeps them all. Rows at -inf do not exist.
    """
    stacked = torch.stack([one.to(scores[0].device) for one in scores])  # [L, B, H, S]
    layers, batch, heads, length = stacked.shape
    counts = torch.full((layers, batch, heads), rows)
    for b in range(batch):
        there = int((stacked[0, b, 0] > -torch.inf).sum())
        if there <= rows:
            counts[:, b] = there
        elif level != "head":
            rivals = stacked[:, b].reshape(1 if level == "pair" else layers, -1)
            most = rows * heads * (layers if level == "pair" else 1)
            best = rivals.argsort(dim=-1, descending=True, stable=True)[:, :most]
            kept = torch.zeros_like(rivals, dtype=torch.bool).scatter_(1, best, True)
            counts[:, b] = kept.view(layers, heads, length).sum(-1)
    return counts.tolist()


def _weights(
    query: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    visible: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax weights [B, Hq, T, S] of rotated queries over keys [B, Hk, S, D], float32 at least.

    Learned `sinks` [Hq] take their share.
    """
    dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
    batch, heads, length, width = query.shape
    folded = query.to(dtype).reshape(batch, keys.shape[1], -1, width)
    scores = folded @ keys.to(dtype).transpose(-1, -2) * scale
    scores = scores.view(batch, heads, length, -1).masked_fill(~visible, -torch.inf)
    return softmax(scores, sinks)


def _visible(layer: EvictingLayer, call: Call, counted: torch.Tensor) -> torch.Tensor:
    """What each query sees of the repeated rows and of the repetition itself, [B, 1 or H, T, m + R]."""
    batch, length = call.query.shape[0], call.query.shape[2]
    own = layer.visible(call)
    if own is None:
        own = counted.new_ones(1, 1, length, layer.rows)
    own = own.expand(batch, -1, -1, -1)
    return torch.cat([counted[:, None, None].expand(-1, own.shape[1], length, -1), own], dim=-1)


def _evicting(cache: KVCache) -> list[EvictingLayer]:
    return [layer for layer in cache.layers if isinstance(layer, EvictingLayer)]


def _padded(lists: Sequence[Sequence[int]], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return lists of numbers side by side, padded on the left with 0, and which entries are real."""
    width = max(map(len, lists))
    numbers = torch.zeros(len(lists), width, dtype=torch.long, device=device)
    real = torch.zeros_like(numbers, dtype=torch.bool)
    for row, some in enumerate(lists):
        start = width - len(some)
        numbers[row, start:] = torch.tensor(list(some), dtype=torch.long, device=device)
        real[row, start:] = True
    return numbers, real


def _by_head(columns: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return columns[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3])
