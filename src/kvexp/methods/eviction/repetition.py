"""What KVzip does: a context is read once, repeated chunk by chunk on forks, and then compressed at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvexp.attention.options import options_of
from kvexp.budget import Budget
from kvexp.cache.kv_cache import KVCache, prefill
from kvexp.errors import UserError
from kvexp.methods.base import several
from kvexp.methods.eviction.caches import evicting_cache
from kvexp.methods.eviction.evictor import MethodEvictor
from kvexp.methods.eviction.reader import Reader, evicting
from kvexp.methods.eviction.score_store import Scores, ScoreStore
from kvexp.prompt import Context

if TYPE_CHECKING:
    from kvexp.methods.eviction.kvzip import KVzip

TAIL = 8  # tokens of the chunk before that lead into the next one


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
        reader = Reader(cache, method.group, method.plus)
        return Scores(repeated(method, model, contexts, cache, reader), reader.most_rows, reader.most_bytes)

    if store is None:
        return make().layers
    options = options_of(model)
    facts = {
        "contexts": [one.key for one in contexts],
        "headers": [len(one.header) for one in contexts],
        **{name: getattr(method, name) for name in ("group", "chunk", "sinks", "repeat", "plus")},
        "dtype": str(model.dtype),
        "options": [options.backend, options.prefill_chunk],
    }
    found, before = store.get(facts, make)
    if before:
        cache.counters["scores_found"] = cache.counters.get("scores_found", 0) + 1
        assert cache.evictor is not None
        cache.evictor.meter.hold(found.rows, prompt=True)
        cache.evictor.meter.weigh(found.bytes, prompt=True)
    layers = evicting(cache)
    return [one.to(layer.keys.device) for one, layer in zip(found.layers, layers, strict=True)]


@torch.no_grad()
def repeated(
    method: KVzip, model: Any, contexts: Sequence[Context], cache: KVCache, reader: Reader | None = None
) -> list[torch.Tensor]:
    """Return the scores [B, H, S] of all rows of each full-attention layer, of use behind the header only.

    Needs an attached model and a cache that has read `contexts` and nothing more, which stays as it is.
    """
    reader = reader or Reader(cache, method.group, method.plus)
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
