"""Storage over other methods: what they keep is what is packed, whenever rows leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import helpers
from helpers import QUERIES
from kvexp import instantiate, tiny
from kvexp.budget import Budget
from kvexp.cache.evicting import EvictingLayer
from kvexp.cache.packed_kept import PackedKept
from kvexp.cache.quantised import quantised_cache
from kvexp.errors import UserError
from kvexp.methods.base import Method
from kvexp.methods.baseline.full import Full
from kvexp.methods.baseline.truncate import Truncate
from kvexp.methods.eviction.adakv import AdaKV
from kvexp.methods.eviction.expected_attention import ExpectedAttention
from kvexp.methods.eviction.h2o import H2O
from kvexp.methods.eviction.keep_all import KeepAll
from kvexp.methods.eviction.knorm import Knorm
from kvexp.methods.eviction.kvzip import KVzip
from kvexp.methods.eviction.pyramidkv import PyramidKV
from kvexp.methods.eviction.rkv import RKV
from kvexp.methods.eviction.snapkv import SnapKV
from kvexp.methods.eviction.streaming_llm import StreamingLLM
from kvexp.methods.eviction.tova import TOVA
from kvexp.methods.eviction.triattention import TriAttention
from kvexp.methods.eviction.two_phase import TwoPhase
from kvexp.methods.memory.asm import ASM
from kvexp.methods.reuse.prophetkv import ProphetKV
from kvexp.methods.reuse.reposition import Reposition
from kvexp.methods.storage.kivi import Kivi
from kvexp.methods.storage.ott import Ott
from kvexp.tasks.batch import QueryBatch

KIVI = Kivi(group=4, residual=4)
OTT = Ott(group=6, residual=4, outliers=1, skip=0)
SNAP = SnapKV(window=4)
EVICTING = {
    "snapkv": SNAP,
    "query_aware": SnapKV(window=4, query_aware=True),
    "adakv": AdaKV(base=SNAP, interval=5),
    "pyramidkv": PyramidKV(window=4, beta=5),
    "kvzip": KVzip(chunk=16),
    "expected_attention": ExpectedAttention(interval=5),
    "rkv": RKV(window=4, interval=5),
    "knorm": Knorm(interval=5),
    "streaming_llm": StreamingLLM(interval=5),
    "two_phase": TwoPhase(at_prefill=SNAP, at_decode=RKV(window=4, interval=5)),
}
each_base = pytest.mark.parametrize("name", EVICTING)


def model(family: str = "llama") -> Any:
    return helpers.model(family, torch.float64)


def begun(method: Method, budget: int = 20, **knobs: Any) -> Any:
    """The cache of a context of 45 tokens; `context` and `family` can be others."""
    context = knobs.pop("context", helpers.context())
    return method.encode(model(knobs.pop("family", "llama")), context, knobs.pop("memory", None), budget)


def fed(cache: Any, queries: Sequence[Sequence[int]], steps: int, family: str = "llama") -> Any:
    """Distributions [B, 1 + steps, V] of queries and of `steps` given tokens, and the cache behind them."""
    batch = QueryBatch(model(family), cache, queries)
    found, running = [batch.logits[:, None]], batch.cache.fork()
    for step in range(steps):
        ids = torch.full((len(queries), 1), 7 + step)
        batch.columns = torch.cat([batch.columns, torch.ones(len(queries), 1, dtype=torch.bool)], dim=1)
        mask = batch.columns if batch.padded else None
        found.append(batch._forward(running, ids, mask, batch.next_position + step, 1))
    return torch.cat(found, dim=1), running


def answered(
    method: Method, queries: Sequence[Sequence[int]] = QUERIES, steps: int = 18, **knobs: Any
) -> Any:
    family = knobs.get("family", "llama")
    with method.attach(model(family), knobs.get("memory")):
        return fed(begun(method, **knobs), queries, steps, family)


def kept(cache: Any) -> list[list[list[int]]]:
    """Positions that each head of each layer holds, of the first sequence."""
    found = []
    for layer in cache.layers:
        if isinstance(layer, EvictingLayer):
            layer = layer.fork()
            layer.own()
            held = layer.held()
            heads = zip(held.positions[0], held.mask()[0], strict=True)
            found.append([positions[mask].tolist() for positions, mask in heads])
    return found


def divergence(method: Method, from_: Method, **knobs: Any) -> float:
    p, q = (answered(one, steps=0, **knobs)[0].log_softmax(-1) for one in (from_, method))
    return float((p.exp() * (p - q)).sum(-1).mean())


@each_base
def test_where_nothing_is_packed_it_is_the_base(name: str) -> None:
    base = EVICTING[name]
    method = replace(OTT if name == "knorm" else KIVI, residual=240, of=base)
    (ours, held), (theirs, other) = (answered(one, QUERIES[:2], steps=9) for one in (method, base))
    assert torch.equal(ours, theirs) and kept(held) == kept(other)
    assert held.counters["evicted"] == other.counters["evicted"] > 0
    assert not held.counters.get("quantised", 0) and held.nbytes() == other.nbytes()


@each_base
def test_bytes_are_really_saved(name: str) -> None:
    """In 2 bits, and against what the tensors hold in memory, whatever they are views of."""
    base = EVICTING[name]
    ids = helpers.tokens(260)
    plain, packed = (begun(one, 100, context=ids) for one in (base, replace(KIVI, of=base)))
    if name == "query_aware":
        with base.attach(model()):
            plain, packed = (QueryBatch(model(), one, QUERIES[:1]).cache for one in (plain, packed))
    assert packed.entries() == plain.entries()
    assert packed.counters["evicted"] == plain.counters["evicted"] > 0
    rows = sum(packed.entries())
    assert rows - 3 * 5 <= packed.counters["quantised"] <= rows - 3 * 4  # all but four (ragged: rounded up)
    notes = [t for layer in packed.layers for t in layer.remembered.values()]  # what either holds beside rows
    notes += [t for layer in packed.layers if layer.queries is not None for t in layer.queries.tensors()]
    beside = sum(t.numel() * t.element_size() for t in notes)
    assert packed.nbytes() - beside < 0.25 * (plain.nbytes() - beside)
    assert packed.nbytes() == packed.sequence_bytes()
    storages = {t.untyped_storage() for layer in packed.layers for t in layer.tensors()}
    in_memory = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert sum(in_memory.values()) == packed.nbytes()


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("name", ["snapkv", "adakv"])
def test_eight_bits_are_near_the_base(name: str, family: str) -> None:
    base = EVICTING[name]
    for storage in (KIVI, OTT):
        losses = [divergence(replace(storage, bits=b, of=base), base, family=family) for b in (2, 8)]
        assert losses[0] > 100 * losses[1] and losses[1] < 2e-4


@each_base
def test_the_prompt_is_chosen_from_in_full(name: str) -> None:
    """What a method keeps of a prompt does not depend on how it is stored."""
    base = EVICTING[name]
    assert kept(begun(replace(KIVI, of=base))) == kept(begun(base))


@pytest.mark.parametrize(
    ("name", "storage"),
    [*((name, KIVI) for name in EVICTING), *((name, OTT) for name in ("query_aware", "adakv"))],
    ids=lambda value: value if isinstance(value, str) else value.id,
)
def test_a_padded_batch_equals_each_alone_through_compressions(name: str, storage: Any) -> None:
    """Queries of unequal lengths, so that sequences let rows leave at different steps."""
    method = replace(storage, of=EVICTING[name])
    together, held = answered(method, steps=8)
    if EVICTING[name].during("decode").interval:
        assert held.counters["quantised"] > 3 * 3 * 16  # not at the end of the prompt alone
    for row, query in enumerate(QUERIES):
        alone, _ = answered(method, [query], steps=8)
        torch.testing.assert_close(together[row], alone[0], atol=1e-9, rtol=0)


@pytest.mark.parametrize(("name", "storage"), [("adakv", KIVI), ("kvzip", KIVI), ("knorm", OTT)])
def test_contexts_of_a_batch_are_packed_as_each_alone(name: str, storage: Any) -> None:
    """The shortest fits into the budget: nothing of it is packed before its own rows leave."""
    method = replace(storage, of=EVICTING[name])
    contexts = [helpers.context(chunks, seed=chunks) for chunks in (6, 2, 5)]
    cache = begun(method, context=contexts)
    assert sum(cache.entries()) < (20 + 1) * 3
    with method.attach(model()):
        together, _ = fed(cache, QUERIES, 8)
        for row, (one, query) in enumerate(zip(contexts, QUERIES, strict=True)):
            alone, _ = fed(begun(method, context=one), [query], 8)
            torch.testing.assert_close(together[row], alone[0], atol=1e-9, rtol=0)


def test_forks_share_packed_rows_and_are_isolated() -> None:
    method = replace(KIVI, of=EVICTING["knorm"])
    cache = begun(method)
    held, shared = cache.nbytes(), [_packed(layer) for layer in cache.layers]
    with method.attach(model()):
        first, fork = fed(cache, QUERIES[2:], 1)
        assert [_packed(layer) for layer in fork.layers] == shared  # the same objects, no row left yet
        _, fork = fed(cache, QUERIES[:1], 8)
        assert not set(map(id, shared)) & {id(_packed(layer)) for layer in fork.layers}
        again, _ = fed(cache, QUERIES[2:], 1)
    assert torch.equal(first, again) and cache.nbytes() == held


def test_true_positions_through_three_compressions() -> None:
    """Rows of the first layer are those of their positions in the whole text, up to eight bits."""
    method = replace(KIVI, bits=8, of=EVICTING["knorm"])
    query = QUERIES[0]
    ids = [*helpers.context().ids, *query]
    _, cache = answered(method, [query], steps=18)  # 5 of the query, and rows leave every 5
    evictor = cache.evictor
    assert evictor.meter.scored == 3 * (1 + 4)  # at the prompt's end, with the query, and three times later
    full = Full().encode(model(), [*ids, *range(7, 25)])
    layer = cache.layers[0].fork()
    layer.own()
    rows = layer.held()
    assert layer.next_position.tolist() == [len(ids) + 18]
    for h in range(2):
        at = rows.positions[0, h].long()
        assert (at.diff() > 0).all() and at.max() == len(ids) + 17
        assert torch.equal(rows.slots[0, h].long(), at)
        for ours, theirs in ((rows.keys, full.layers[0].keys), (rows.values, full.layers[0].values)):
            error = (ours[0, h] - theirs[0, h, at]).abs().amax(0)
            assert (error < 0.05 * theirs[0, h].std(0)).all()
            newest = theirs[0, h, at[-4:]]  # in full
            torch.testing.assert_close(ours[0, h, -4:], newest, atol=1e-12, rtol=0)


def test_generate_goes_through_compressions() -> None:
    method, query = replace(OTT, of=EVICTING["two_phase"]), QUERIES[0]
    cache = begun(method)
    ids = torch.tensor([[*([0] * cache.seen), *query]])
    model().generation_config.eos_token_id = None
    with method.attach(model()):
        theirs = model().generate(ids, cache=cache.fork(), max_new_tokens=16, do_sample=False)
        ours, _ = QueryBatch(model(), cache, [query]).generate(16, lambda made: None)
    assert ours[0] == theirs[0, ids.shape[1] :].tolist()
    usage = cache.evictor.usage()
    assert "packed" in usage["storage"].split("+")
    plain = begun(EVICTING["two_phase"])
    with method.attach(model()):
        QueryBatch(model(), plain, [query]).generate(16, lambda made: None)
    assert usage["entries_peak"] == plain.evictor.usage()["entries_peak"]
    assert usage["bytes_peak"] < 0.8 * plain.evictor.usage()["bytes_peak"]


def test_an_empty_context_is_packed_when_the_prompt_has_been_read() -> None:
    method = replace(KIVI, of=SNAP)
    cache = begun(method, context=[])
    assert not cache.counters
    with method.attach(model()):
        batch = QueryBatch(model(), cache, [helpers.tokens(45)])
    assert batch.cache.counters == {"evicted": 3 * 2 * 25, "quantised": 3 * 16}


def test_over_truncate_and_in_chunks() -> None:
    short = begun(replace(KIVI, of=Truncate(keep="head")), 24)
    text = Truncate(keep="head").select(helpers.context(), 24)
    assert short.seen == len(text) == 24
    whole = KIVI.encode(model(), text)
    in_chunks = begun(replace(KIVI, of=Truncate(keep="head"), prefill="chunks"), 24)
    with KIVI.attach(model()):
        ours, theirs, parts = (fed(one, QUERIES, 6)[0] for one in (short, whole, in_chunks))
    assert torch.equal(ours, theirs) and torch.equal(parts, theirs)
    assert replace(KIVI, of=Truncate()).uses_budget and not KIVI.uses_budget


def test_over_reuse() -> None:
    """What a reuse method places and mends is packed like any context; its store and query are its own."""
    method = replace(KIVI, of=Reposition())
    cache = begun(method, memory=method.opened(model()))
    plain = begun(Reposition())
    by_hand = quantised_cache(plain, [method.scheme(layer) for layer in range(3)])
    with method.attach(model()):
        ours, theirs = (fed(one, QUERIES, 6)[0] for one in (cache, by_hand))
    assert torch.equal(ours, theirs)
    assert cache.counters["reused"] > 0 and cache.counters["quantised"] > 3 * (45 - 4)
    asking = replace(KIVI, of=ProphetKV())
    assert asking.needs_query and not replace(KIVI, of=Reposition()).exact
    assert asking.expects == ("reused", "recomputed", "quantised")
    asked = asking.encode(model(), helpers.context(), query=QUERIES[0])
    assert asked.counters["question_rows"] > 0 and asked.counters["quantised"] == 3 * (45 - 4)


def test_over_a_method_that_learns(tmp_path: Path) -> None:
    base = TriAttention(interval=5, protect_prompt=False, mode="per_layer_perhead")
    for method in (replace(KIVI, of=base), replace(KIVI, of=AdaKV(base=replace(base, interval=128)))):
        assert method.needs_calibration and method.learns_from == "text"
        assert method.memory_id == base.memory_id and method.memory_class() is base.memory_class()
        assert method.memory_facts(Budget(20), 0) == base.memory_facts(Budget(20), 0)
        assert method.expects == ("evicted", "quantised")
    method = replace(KIVI, of=base)
    calibration = helpers.Calibration(helpers.Context((), ()), [helpers.tokens(60)], tmp_path)
    memory = method.prepare(model(), calibration, Budget(20))
    ours, held = answered(method, QUERIES[:1], memory=memory)
    assert held.counters["quantised"] > 3 * 16
    wide, _ = answered(replace(method, residual=64), QUERIES[:1], memory=memory)
    assert torch.equal(wide, answered(base, QUERIES[:1], memory=memory)[0])
    assert not torch.allclose(ours, wide)


def test_what_a_base_says_of_itself() -> None:
    assert Kivi().expects == ("quantised",) and Kivi().exact and not Kivi().uses_budget
    over = replace(KIVI, of=ExpectedAttention())
    assert over.taps and over.uses_budget and over.expects == ("evicted", "quantised")
    ids = replace(KIVI, of=KVzip(repeat="Ab")).tokenized(tiny.tokenizer())
    assert ids == replace(KIVI, of=KVzip(repeat="Ab").tokenized(tiny.tokenizer()))
    with pytest.raises(UserError, match="budget=4 leaves snapkv nothing to choose"):
        replace(KIVI, of=SNAP).check_budget(Budget(4))
    with pytest.raises(UserError, match=r"nothing to pack beside method.residual=128 .* budget=129"):
        Kivi(of=SNAP).check_budget(Budget(128))
    Kivi(of=SNAP).check_budget(Budget(129))
    Kivi().check_budget(Budget(1))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Kivi(of=H2O()), "method.of=h2o is not possible: it reads all rows at every step: take"),
        (lambda: Kivi(of=TwoPhase(at_decode=H2O(interval=8))), "method.of=two_phase .* at every step"),
        (
            lambda: Kivi(of=TOVA()),
            "method.of=tova .*: give it an interval, such as {name: tova, interval: 64}",
        ),
        (lambda: Ott(of=TwoPhase(at_decode=TOVA())), "method.of=two_phase .*{name: tova, interval: 64}"),
        (lambda: Kivi(of=KeepAll()), "method.of=keep_all .* no row ever leaves"),
        (lambda: Kivi(of=StreamingLLM(interval=8, rope="in_cache")), "use rope=original"),
        (lambda: Kivi(of=ASM()), "method.of=asm holds no rows that could be packed"),
        (lambda: Kivi(of=Ott()), "method.of=ott packs rows itself"),
        (lambda: Kivi(of=SNAP, prefill="chunks"), "method.prefill=chunks .* snapkv reads it in its own way"),
        (lambda: Kivi(of=Reposition(), prefill="chunks"), "method.prefill=chunks .* reposition"),
        (lambda: Kivi(of=RKV(), decode=False), "rows leave while decoding too.*: use method.decode=true"),
    ],
)
def test_refused(make: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make()


def test_written_on_a_command_line() -> None:
    node = {"_target_": "kvexp.methods.storage.kivi.Kivi", "of": {"name": "rkv", "interval": 64}}
    assert instantiate.build("method", "kivi", node) == Kivi(of=RKV(interval=64))
    assert instantiate.build("method", "kivi", {**node, "of": "snapkv"}) == Kivi(of=SnapKV())
    with pytest.raises(UserError, match="did you mean 'snapkv'"):
        instantiate.build("method", "kivi", {**node, "of": "snapk"})


def _packed(layer: Any) -> PackedKept:
    [source] = [source for source in layer.sources if isinstance(source, PackedKept)]
    return source
