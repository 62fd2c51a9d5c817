from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

import helpers
import kvexp
from evict import _rows, each_setting
from kvexp import tiny
from kvexp.attention.function import Call, Padding
from kvexp.attention.options import Options, set_options
from kvexp.cache.evicting import EvictingLayer
from kvexp.cache.kv_cache import KVCache, prefill
from kvexp.errors import UserError
from kvexp.methods.eviction import reader as reader_module
from kvexp.methods.eviction.caches import evicting_cache
from kvexp.methods.eviction.evictor import MethodEvictor
from kvexp.methods.eviction.kvzip import KVzip
from kvexp.methods.eviction.reader import Reader
from kvexp.methods.eviction.repetition import protect, repeated, shares
from kvexp.prompt import Context
from kvexp.tasks.batch import QueryBatch

INSTRUCTION = (250, 9, 31)
BUDGET = 12
CONTEXTS = [helpers.context(chunks, 7, header, seed=3) for chunks, header in ((6, 3), (4, 5), (5, 1))]
SMALL = KVzip(sinks=2, chunk=16, repeat=INSTRUCTION)
each_level = pytest.mark.parametrize("level", ["pair", "layer", "head"])


def full(model: Any, contexts: Sequence[Context]) -> KVCache:
    """A cache that has read contexts and evicts nothing."""
    cache = evicting_cache(model, MethodEvictor(SMALL, None))
    return prefill(model, [one.ids for one in contexts], cache)


@cache
@torch.no_grad()
def reference(family: str, context: Context, plus: bool = False) -> list[list[list[float]]]:
    """Scores [layer][KV head][row] from plain forwards over context and repetition, without any cache.

    The weights that eager attention reports over everything are those over a subset once they are divided by
    their sum over it. For KVzip+ the output projection is fed with one value in the place of one head.
    """
    # A model of its own: transformers leaves hooks in one that was asked for its attention.
    model, ids, header = tiny.build(family), context.ids, len(context.header)
    kv_heads = model.config.num_key_value_heads
    scores: list[list[list[float]]] = []
    model.set_attn_implementation("eager")
    modules = [layer.self_attn for layer in model.model.layers]
    states: dict[int, torch.Tensor] = {}
    for at, module in enumerate(modules):
        module.register_forward_pre_hook(partial(keep_state, states, at), with_kwargs=True)
    for start in range(header, len(ids), SMALL.chunk):
        chunk = range(start, min(start + SMALL.chunk, len(ids)))
        text = [*INSTRUCTION, *ids[max(header, start - 8) : start], *(ids[i] for i in chunk)]
        everything = torch.tensor([[*ids, *text]])
        output = model(everything, output_attentions=True)
        layers = output.attentions
        scores = scores or [[[0.0] * len(ids) for _ in range(kv_heads)] for _ in layers]
        for layer, weights in enumerate(layers):
            values = values_of(modules[layer], output.past_key_values.layers[layer])
            for head in range(weights.shape[1]):
                mine = scores[layer][head * kv_heads // weights.shape[1]]
                value = values[head * values.shape[0] // weights.shape[1]]
                alone = torch.zeros(len(value), weights.shape[1], value.shape[1])
                alone[:, head] = value
                projection = modules[layer].o_proj.weight
                norms = torch.nn.functional.linear(alone.flatten(1), projection).norm(dim=1).tolist()
                for t in range(len(ids), everything.shape[1]):
                    row = weights[0, head, t].double()
                    subset = {*range(SMALL.sinks), *chunk, *range(len(ids), t + 1)}
                    mass = sum(float(row[j]) for j in subset)
                    read = float(states[layer][0, t].norm())
                    for j in chunk:
                        factor = norms[j] / read if plus else 1.0
                        mine[j] = max(mine[j], factor * float(row[j]) / mass)
    return scores


def values_of(module: Any, rows: Any) -> torch.Tensor:
    """The values [Hk, T, Dv] that attention read, of the rows in transformers' own cache."""
    if hasattr(module, "expand_kv"):
        return module.expand_kv(rows.keys, rows.values)[1][0]
    return rows.values[0]


def keep_state(states: dict[int, torch.Tensor], at: int, module: Any, args: Any, words: Any) -> None:
    states[at] = words["hidden_states"] if "hidden_states" in words else args[0]


def chosen(scores: list[list[list[float]]], context: Context, level: str) -> list[list[list[int]]]:
    """Kept rows [layer][head], by sorting every (layer, head, row) that competes."""
    always = range(max(len(context.header), SMALL.sinks))
    kept: list[list[list[int]]] = [[[] for _ in heads] for heads in scores]
    pairs = [
        (j not in always, -score, layer, head, j)
        for layer, heads in enumerate(scores)
        for head, rows in enumerate(heads)
        for j, score in enumerate(rows)
    ]
    rival = {"pair": lambda p: 0, "layer": lambda p: p[2], "head": lambda p: p[2:4]}[level]
    room = BUDGET * len(pairs) // len(context) // len({rival(p) for p in pairs})
    left = {rival(p): room for p in pairs}
    for pair in sorted(pairs):
        if left[rival(pair)]:
            left[rival(pair)] -= 1
            kept[pair[2]][pair[3]].append(pair[4])
    return [[sorted(rows) for rows in heads] for heads in kept]


def held(cache: KVCache, b: int = 0) -> list[list[list[int]]]:
    """The positions that a cache holds, [layer][head]."""
    found = []
    for layer in cache.layers:
        parts = [source.unpack() for source in layer.sources]
        parts += [layer.held()] if layer.rows else []
        found.append([_rows(parts, b, h)[2] for h in range(layer.keys.shape[1])])
    return found


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3"])
def test_scores_are_those_of_plain_forwards(family: str, plus: bool) -> None:
    model, context, method = helpers.model(family), CONTEXTS[0], replace(SMALL, plus=plus)
    with method.attach(model):
        [*ours] = repeated(method, model, [context], full(model, [context]))
    for mine, theirs in zip(ours, reference(family, context, plus), strict=True):
        wanted = torch.tensor(theirs)
        if family == "deepseek_v3":  # one latent row serves all heads
            wanted = wanted.amax(0, keepdim=True)
        torch.testing.assert_close(mine[0, :, 3:], wanted[:, 3:], atol=1e-5, rtol=1e-4)


@each_level
@pytest.mark.parametrize(("family", "plus"), [("llama", False), ("qwen3", False), ("qwen3", True)])
def test_keeps_what_the_reference_keeps(family: str, plus: bool, level: str) -> None:
    model, method = helpers.model(family), replace(SMALL, level=level, plus=plus)
    batch = method.encode(model, CONTEXTS, budget=BUDGET)
    for b, context in enumerate(CONTEXTS):
        wanted = chosen(reference(family, context, plus), context, level)
        assert held(method.encode(model, context, budget=BUDGET)) == wanted
        assert held(batch, b) == wanted


@each_setting
@each_level
def test_totals_are_exact_and_bytes_are_those_of_the_rows(level: str, dtype: torch.dtype) -> None:
    model, method = helpers.model("llama", dtype), KVzip(sinks=2, chunk=16, repeat=INSTRUCTION, level=level)
    layers, heads, width = 3, 2, model.config.head_dim
    cache = method.encode(model, CONTEXTS[0], budget=BUDGET)
    lengths = [[len(rows) for rows in of_layer] for of_layer in held(cache)]
    totals = [sum(of_layer) for of_layer in lengths]
    assert sum(totals) == layers * heads * BUDGET
    assert all(set(range(3)) <= set(rows) for of_layer in held(cache) for rows in of_layer)
    ragged = any(len(set(of_layer)) > 1 for of_layer in lengths)
    assert ragged == (level != "head")
    assert (set(totals) == {heads * BUDGET}) == (level != "pair")
    place = 4 + 4  # slot and position of a row
    assert cache.nbytes() == layers * heads * BUDGET * (2 * width * dtype.itemsize + place)
    assert cache.counters["evicted"] == layers * heads * (len(CONTEXTS[0]) - BUDGET)
    assert ("ragged" in cache.evictor.meter.storages) == (level != "head")


def test_a_repetition_leaves_nothing_behind() -> None:
    model = helpers.model("qwen3")
    with SMALL.attach(model):
        cache = full(model, CONTEXTS[:1])
        before = held(cache), cache.nbytes(), cache.seen
        scores = repeated(SMALL, model, CONTEXTS[:1], cache)
        set_options(model, Options(prefill_chunk=5))
        try:
            parts = repeated(SMALL, model, CONTEXTS[:1], cache)
        finally:
            set_options(model, Options())
    assert (held(cache), cache.nbytes(), cache.seen) == before
    for one, other in zip(scores, parts, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_queries_read_what_was_kept_at_their_true_positions(family: str) -> None:
    """With one row a head gone the answer is near that of the whole context; with none gone it is that."""
    model, context = helpers.model(family), CONTEXTS[0]
    caches = [SMALL.encode(model, context, budget=len(context) - gone) for gone in (0, 1)]
    with SMALL.attach(model):
        whole, small = (QueryBatch(model, cache, helpers.QUERIES).logits for cache in caches)
    for row, query in enumerate(helpers.QUERIES):
        plain = helpers.plain_logits(model, [*context.ids, *query])[-1]
        torch.testing.assert_close(whole[row], plain, atol=1e-4, rtol=0)
        assert not torch.equal(small[row], plain)
        assert torch.cosine_similarity(small[row], plain, dim=0) > 0.9


class OneLayer:
    """Stands for a model of one layer whose queries and keys [Hq or H, T, 1] are given."""

    def __init__(self, steps: Sequence[tuple[Any, Any]], module: Any = None) -> None:
        self.steps, self.module = iter(steps), module or torch.nn.Module()

    def get_input_embeddings(self) -> Any:
        return torch.nn.Embedding(1, 1)

    def __call__(self, tokens: torch.Tensor, cache: KVCache, **_: Any) -> None:
        query, key = (torch.tensor(x)[None, ..., None] for x in next(self.steps))
        assert tokens.shape[1] == query.shape[2]
        keywords: dict[str, Any] = {}
        rows = cache.layers[0].update(key, key, kwargs=keywords)
        call = Call(self.module, query, *rows, 1.0, None, Padding(None), None, False)
        cache.layers[0].attend(call)
        cache.layers[0].after(call)


@pytest.mark.parametrize(
    ("group", "wanted"),
    [("max", [1 / 4, 1 / 2]), ("mean", [(1 / 4 + 6 / 33) / 2, (1 / 2 + 3 / 33) / 2])],
)
def test_scores_by_hand(group: str, wanted: list[float]) -> None:
    """A key log w has, for a query 1, weight w. Rows 1 (sink), 100 (another chunk), 2 and 4 (the chunk); the
    repetition adds 1 and 3. Its first token sees 1 + 2 + 4 + 1 = 8: shares 1/4 and 1/2. The second sees 11.
    The other query head asks -1, and has weights 1/w: 1 + 1/2 + 1/4 + 1 = 11/4, so 2/11 and 1/11."""
    model = OneLayer([([[1.0] * 4], [[1.0, 100.0, 2.0, 4.0]]), ([[1.0, 1.0], [-1.0, -1.0]], [[1.0, 3.0]])])
    model.steps = iter([(q, torch.tensor(k).log().tolist()) for q, k in model.steps])
    cache = KVCache([EvictingLayer(0)], evictor=MethodEvictor(KVzip(), None))
    model(torch.zeros(1, 4), cache=cache)
    reader = Reader(cache, group)
    reader.repeat(model, cache, [[7, 8]], [[0, 2, 3]])
    torch.testing.assert_close(reader.scores[0][0, 0, 2:], torch.tensor(wanted))
    assert reader.scores[0][0, 0, 1] == 0


@pytest.mark.parametrize(
    ("group", "wanted"),
    [("max", [5 / 11, 10 / 11]), ("mean", [(5 / 11 + 3 / 37) / 2, (10 / 11 + 3 / 74) / 2])],
)
def test_plus_by_hand(group: str, wanted: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, with states of norm 10 and 2 at the two tokens, so that the second one's weights count.

    They are 2/11 and 4/11 for the first query head, (1/2 and 1/4) / (37/12) = 6/37 and 3/37 for the second,
    and half of that over the norm. A value, log w as its key, is written as (3 v, 4 v) by the first head, of
    norm 5 v, and as (v, 0) by the second.
    """
    module: Any = torch.nn.Module()
    module.layer_idx = 0
    module.o_proj = torch.nn.Linear(2, 2)  # its bias has no part in it
    module.o_proj.weight.data = torch.tensor([[3.0, 1.0], [4.0, 0.0]])
    model = OneLayer(
        [([[1.0] * 4], [[1.0, 100.0, 2.0, 4.0]]), ([[1.0, 1.0], [-1.0, -1.0]], [[1.0, 3.0]])], module
    )
    model.steps = iter([(q, torch.tensor(k).log().tolist()) for q, k in model.steps])
    cache = KVCache([EvictingLayer(0)], evictor=MethodEvictor(KVzip(), None))
    model(torch.zeros(1, 4), cache=cache)
    monkeypatch.setattr(
        reader_module, "state_norms", lambda model: nullcontext({0: torch.tensor([[10.0, 2.0]])})
    )
    reader = Reader(cache, group, plus=True)
    reader.repeat(model, cache, [[7, 8]], [[0, 2, 3]])
    expected = torch.tensor(wanted) * torch.tensor([2.0, 4.0]).log()
    torch.testing.assert_close(reader.scores[0][0, 0, 2:], expected)


def test_shares_by_hand() -> None:
    """Two layers of two heads and four rows, two rows a head: eight stay of sixteen.

    Over all: 9 8 7 7 6 5 5 and, of three rows with 4, the first: that of layer 0, head 1. Within layer 0 the
    four of head 0 are the best; within layer 1 they are 7 5 5 and, of two rows with 4, that of head 0.
    """
    scores = [
        torch.tensor([[[9.0, 8.0, 7.0, 6.0], [4.0, 1.0, 0.0, 0.0]]]),
        torch.tensor([[[5.0, 1.0, 4.0, 1.0], [5.0, 4.0, 7.0, 0.0]]]),
    ]
    assert shares(scores, 2, "head") == [[[2, 2]], [[2, 2]]]
    assert shares(scores, 2, "layer") == [[[4, 0]], [[2, 2]]]
    assert shares(scores, 2, "pair") == [[[4, 1]], [[1, 2]]]


def test_shares_count_each_sequence_alone() -> None:
    """The first sequence has two rows and keeps them; the second one keeps as many as it would alone."""
    pad = -torch.inf
    scores = [torch.tensor([[[pad, pad, 1.0, 2.0]] * 2, [[4.0, 3.0, 2.0, torch.inf], [9.0, 0.0, 0.0, 1.0]]])]
    assert shares(scores, 2, "layer") == [[[2, 2], [3, 1]]]


def test_what_always_stays() -> None:
    cache = KVCache([EvictingLayer(0)])
    cache.layers[0].seen = 6
    cache.columns = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
    [scores] = protect([torch.ones(2, 1, 6)], cache, [1, 2], recent=1)
    inf = torch.inf
    assert scores[:, 0].tolist() == [[inf, 1, 1, 1, 1, inf], [-inf, -inf, inf, inf, 1, inf]]


def test_the_instruction_is_text_ids_or_the_header() -> None:
    model, context = helpers.model("llama"), CONTEXTS[0]

    def scores(method: KVzip) -> list[torch.Tensor]:
        with method.attach(model):
            return repeated(method, model, [context], full(model, [context]))

    text = KVzip(sinks=2, chunk=16, repeat="Ab")
    ids = text.tokenized(tiny.tokenizer())
    assert len(ids.repeat) == 2 and ids == ids.tokenized(None)
    assert all(map(torch.equal, scores(text), scores(KVzip(sinks=2, chunk=16, repeat=context.header))))
    assert not any(map(torch.equal, scores(text), scores(ids)))


def test_refuses_what_makes_no_sense() -> None:
    model = helpers.model("llama")
    with pytest.raises(UserError, match=r"method.chunk=0"):
        KVzip(chunk=0)
    with pytest.raises(UserError, match=r"no 'method.interval'"):
        kvexp.method("kvzip", interval=4)
    with pytest.raises(UserError, match="no context to repeat"):
        SMALL.encode(model, [], budget=8)
    with pytest.raises(UserError, match="use budget=6 or more"):
        SMALL.encode(model, CONTEXTS, budget=5)
