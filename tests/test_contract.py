"""What every method promises, tested for each YAML in conf/method on tiny models of each family.

`make test` runs every method on three families and every family with one method of each kind; the rest of
the product is marked slow (`make test-all`). A pair that cannot work stands in REFUSED with its reason,
and is tested.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import helpers
from helpers import FAMILIES, PRESET_NAMES, QUERIES, Calibration, plain_logits, tokens
from kvexp import instantiate
from kvexp.attention.attach import attention_modules
from kvexp.attention.options import Options, set_options
from kvexp.budget import Budget
from kvexp.cache.evicting import EvictingLayer
from kvexp.errors import UserError
from kvexp.methods.base import Method
from kvexp.methods.eviction.base import EvictionMethod
from kvexp.methods.memory.states import StateMemory
from kvexp.tasks.batch import QueryBatch

CONF = Path(__file__).parents[1] / "conf" / "method"
METHODS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(CONF.glob("*.yaml"))}
EVICTION = ".methods.eviction."
BROAD = ("llama", "qwen3", "gpt_oss")  # families on which every method runs in `make test`
ONE_OF_EACH_KIND = ("full", "asm", "snapkv", "agentkvshift", "kivi")
NEED_FULL_LAYER = [
    name for name, node in METHODS.items() if instantiate.target("method", name, node).needs_full_layer
]
REFUSED = {(name, "mistral"): "no full-attention layer" for name in NEED_FULL_LAYER}


def pairs() -> list[Any]:
    """Every (method, family), the far part of the product marked slow, refused pairs left out."""
    cases = []
    for name in METHODS:
        for family in FAMILIES:
            if (name, family) in REFUSED:
                continue
            near = family in BROAD or name in ONE_OF_EACH_KIND
            cases.append(pytest.param(name, family, marks=() if near else pytest.mark.slow))
    return cases


each_pair = pytest.mark.parametrize(("name", "family"), pairs())
each_eviction = pytest.mark.parametrize(
    ("name", "family"), [case for case in pairs() if EVICTION in METHODS[case.values[0]]["_target_"]]
)
each_pair_and_preset = pytest.mark.parametrize(
    ("name", "family"), [*pairs(), *((name, preset) for name in ONE_OF_EACH_KIND for preset in PRESET_NAMES)]
)


def built(name: str, budget: int | None = None) -> Method:
    """The method of a YAML; knobs that count rows are made small where the budget is."""
    method = instantiate.build("method", name, METHODS[name])
    return method if budget is None else shrunk(method, budget)


def shrunk(method: Method, budget: int) -> Method:
    """The same method with windows, intervals and protected rows that fit into a tiny budget."""
    most = {"window": 4, "recent": 5, "sinks": 2, "interval": 4, "heavy": 6, "page": 2, "chunk": 16}
    most |= {"residual": 8, "group": 8}
    changes: dict[str, Any] = {}
    for field in fields(method):
        value = getattr(method, field.name)
        if isinstance(value, Method):
            changes[field.name] = shrunk(value, budget)
        elif field.name in most and isinstance(value, int) and value > most[field.name]:
            changes[field.name] = most[field.name]
    return replace(method, **changes)


def changed(method: Method, knobs: dict[str, Any]) -> Method:
    """The same method with other knobs, where it or one of its parts has them."""
    values = {field.name: getattr(method, field.name) for field in fields(method)}
    mine = {key: value for key, value in knobs.items() if key in values}
    rest = {key: value for key, value in knobs.items() if key not in values}
    if rest:
        mine |= {key: changed(part, rest) for key, part in values.items() if isinstance(part, Method)}
    return replace(method, **mine)


class Ready:
    """A method with its memory and encoded context on a tiny model."""

    def __init__(
        self, method: Method, model: Any, context: Any, folder: Path, budget: Budget, traces: Any
    ) -> None:
        self.method, self.model, self.context, self.budget = method, model, context, budget
        self.memory = None
        if method.needs_calibration:
            self.memory = prepared(method, model, context, folder, budget, traces)
        self.asked = {"query": QUERIES[0]} if method.needs_query else {}
        self.cache = method.encode(model, context, self.memory, budget, **self.asked)

    def attach(self) -> Any:
        return self.method.attach(self.model, self.memory)

    def logits(self, queries: Any) -> torch.Tensor:
        with self.attach():
            return QueryBatch(self.model, self.cache, queries).logits


MEMORIES: dict[Any, Any] = {}  # by what they were made of: a memory is never changed


def prepared(method: Method, model: Any, context: Any, folder: Path, budget: Budget, traces: Any) -> Any:
    """The memory of a method, built once for all tests that want the same."""
    key = method, id(model), context.key, budget, tuple(traces)
    if key not in MEMORIES:
        MEMORIES[key] = method.prepare(model, Calibration(context, traces, folder), budget)
    return MEMORIES[key]


def exact(name: str, family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Ready:
    """The method in the setting in which it claims to equal full attention."""
    method, context = built(name), helpers.context()
    if name == "no_context":  # exact when there are no demonstrations
        context = replace(context, chunks=())
    traces = QUERIES
    if method.family == "memory":  # exact for queries that the memory holds: every token its own entry
        method = replace(method, samples="float32")
    if method.family == "reuse":  # exact when all tokens are recomputed
        method = changed(method, {"recompute": "1"})
    if method.family == "storage":  # exact while the newest rows, which stay in full, are all
        method = replace(method, residual=4096)
    return Ready(method, helpers.model(family, dtype), context, folder, Budget(4096), traces)


def tight(name: str, family: str, folder: Path, **knobs: Any) -> Ready:
    """The method at a budget that is far below the context; `knobs` are set where the method has them."""
    traces = [tokens(8, seed=s) for s in range(8)]
    method = changed(built(name, 17), knobs)
    # A last bit of float32 flips a code of a quantised row; of float64, it does not.
    dtype = torch.float64 if method.family == "storage" else torch.float32
    return Ready(method, helpers.model(family, dtype), helpers.context(), folder, Budget(17), traces)


@each_pair_and_preset
def test_exact_where_it_says_so(name: str, family: str, tmp_path: Path) -> None:
    ready = exact(name, family, tmp_path)
    if not ready.method.exact:
        assert type(ready.method).exact is False
        return
    ours = ready.logits(QUERIES)
    for row, query in enumerate(QUERIES):
        full = plain_logits(ready.model, [*ready.context.ids, *query])[-1]
        torch.testing.assert_close(ours[row], full, atol=1e-4, rtol=0)


@each_pair
def test_in_bfloat16_it_stays_near_full(name: str, family: str, tmp_path: Path) -> None:
    ready = exact(name, family, tmp_path, torch.bfloat16)
    if not ready.method.exact:
        assert type(ready.method).exact is False
        return
    full = exact("full", family, tmp_path / "full", torch.bfloat16)
    full.context = ready.context
    full.cache = full.method.encode(full.model, full.context)
    ours, theirs = ready.logits(QUERIES[:1]), full.logits(QUERIES[:1])
    assert ours.isfinite().all()
    if not hasattr(ready.model.model.layers[-1].mlp, "experts"):  # a last bit flips a router
        assert torch.cosine_similarity(ours, theirs).item() > 0.99


@each_pair
def test_attach_leaves_nothing_behind(name: str, family: str, tmp_path: Path) -> None:
    ready = tight(name, family, tmp_path)
    model, ids = ready.model, [*ready.context.ids, *QUERIES[0]]
    before, implementation = plain_logits(model, ids), model.config._attn_implementation
    ready.logits(QUERIES)
    assert model.config._attn_implementation == implementation
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(hasattr(module, "kvexp") for module in attention_modules(model))
    assert torch.equal(plain_logits(model, ids), before)


@each_pair_and_preset
def test_padded_batch_equals_single(name: str, family: str, tmp_path: Path) -> None:
    ready = tight(name, family, tmp_path)
    together = ready.logits(QUERIES)
    for row, query in enumerate(QUERIES):
        torch.testing.assert_close(together[row], ready.logits([query])[0], atol=1e-4, rtol=0)


@each_pair_and_preset
def test_chunked_append_equals_one_shot(name: str, family: str, tmp_path: Path) -> None:
    # Rows that leave between the parts are missing for the second: nothing may leave while decoding, and
    # none may be quantised.
    ready, query = tight(name, family, tmp_path, interval=1_000_000, decode=False), QUERIES[1]
    whole = ready.logits([query])[0]
    with ready.attach():
        batch = QueryBatch(ready.model, ready.cache, [query[:4]])
        parts = batch.extend([query[4:]])[0, -1]
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=0)


@each_pair
def test_chunked_prefill_equals_one_shot(name: str, family: str, tmp_path: Path) -> None:
    ready = exact(name, family, tmp_path / "whole")  # k-means would amplify a rounding into another cluster
    set_options(ready.model, Options(prefill_chunk=5))
    try:
        parts = exact(name, family, tmp_path / "parts")
    finally:
        set_options(ready.model, Options())
    torch.testing.assert_close(parts.logits(QUERIES), ready.logits(QUERIES), atol=1e-4, rtol=0)


@each_pair
def test_rows_stay_within_the_budget(name: str, family: str, tmp_path: Path) -> None:
    ready = tight(name, family, tmp_path)
    if ready.method.uses_budget or name == "no_context":
        entries = ready.cache.entries()  # the budget is their mean, and each is rounded up to a whole row
        assert sum(entries) < (ready.budget.rows + 1) * len(entries)
    assert len({layer.get_seq_length() for layer in ready.cache.layers}) == 1


@each_pair
def test_append_is_causal(name: str, family: str, tmp_path: Path) -> None:
    ready = tight(name, family, tmp_path)
    with ready.attach():
        batch = QueryBatch(ready.model, ready.cache, [QUERIES[0]])
        one, other = (batch.extend([[7, 8, last]])[0] for last in (9, 200))
    torch.testing.assert_close(one[:2], other[:2], atol=1e-6, rtol=0)
    assert not torch.allclose(one[2], other[2], atol=1e-3)


@each_pair
def test_forks_are_isolated(name: str, family: str, tmp_path: Path) -> None:
    ready = tight(name, family, tmp_path)
    seen, held = ready.cache.seen, ready.cache.nbytes()
    first = ready.logits(QUERIES[:1])
    ready.logits(QUERIES[1:])
    assert torch.equal(ready.logits(QUERIES[:1]), first)
    assert (ready.cache.seen, ready.cache.nbytes()) == (seen, held)


@each_pair_and_preset
def test_generate_equals_a_manual_loop(name: str, family: str, tmp_path: Path) -> None:
    ready, query, new = tight(name, family, tmp_path), QUERIES[0], 6
    ids = torch.tensor([[*([0] * ready.cache.seen), *query]])
    ready.model.generation_config.eos_token_id = None
    with ready.attach():
        theirs = ready.model.generate(ids, cache=ready.cache.fork(), max_new_tokens=new, do_sample=False)
        ours, ends = QueryBatch(ready.model, ready.cache, [query]).generate(new, lambda made: None)
    assert ours[0] == theirs[0, ids.shape[1] :].tolist()
    assert ends == ["length"]


@each_eviction
def test_rows_stay_within_budget_and_interval(name: str, family: str, tmp_path: Path) -> None:
    ready = tight(name, family, tmp_path)
    interval = ready.method.during("decode").interval
    with ready.attach():
        batch = QueryBatch(ready.model, ready.cache, [QUERIES[0]])
        cache, logits = batch.cache.fork(), batch.logits
        for step in range(12):
            tokens = logits.argmax(-1, keepdim=True)
            position = batch.next_position + step
            logits = ready.model(tokens, cache=cache, position_ids=position).logits[:, -1]
            rows = cache.entries()
            if not ready.method.uses_budget:
                assert rows == [cache.seen] * len(rows)
            elif interval is None:  # rows of the query and of the answer come on top
                most = ready.budget.rows + len(QUERIES[0]) + step + 1
                assert sum(rows) < (most + 1) * len(rows)  # a mean over layers, each rounded up
            else:
                assert sum(rows) <= (ready.budget.rows + interval - 1) * len(rows)
        layers = [layer for layer in cache.layers if isinstance(layer, EvictingLayer)]
        for layer in layers:
            layer.own()
            held = layer.held()
            both = held.mask()[..., 1:] & held.mask()[..., :-1]
            assert (held.slots.diff(dim=-1) > 0)[both].all()  # in order, none twice
            assert layer.next_position.tolist() == [len(ready.context) + len(QUERIES[0]) + 12]


@each_eviction
def test_the_next_position_is_the_true_one(name: str, family: str, tmp_path: Path) -> None:
    """A plain forward gets its positions from the cache, and they count what has left."""
    ready = tight(name, family, tmp_path)
    ids = torch.tensor([list(QUERIES[0])])
    with ready.attach():
        plain = ready.model(ids, cache=ready.cache.fork()).logits
        positions = torch.arange(len(ready.context), len(ready.context) + ids.shape[1])[None]
        told = ready.model(ids, cache=ready.cache.fork(), position_ids=positions).logits
    assert torch.equal(plain, told)


@each_eviction
def test_a_long_prompt_is_never_held_whole(name: str, family: str, tmp_path: Path) -> None:
    decides = built(name, 17).during("prefill")
    if not decides.uses_budget or type(decides).encode is not EvictionMethod.encode:
        return  # evicts nothing, or reads the prompt twice
    set_options(helpers.model(family), Options(prefill_chunk=6))
    try:
        ready = tight(name, family, tmp_path, prefill="chunks")
    finally:
        set_options(helpers.model(family), Options())
    most = max(decides.layer_rows(layer, 3, 17, 45) for layer in range(3))
    assert ready.cache.evictor.meter.prompt_peak <= most + 6
    assert sum(ready.cache.entries()) <= 17 * len(ready.cache.entries())
    assert ready.logits(QUERIES).isfinite().all()


@each_pair
def test_a_batch_of_contexts_equals_each_alone(name: str, family: str, tmp_path: Path) -> None:
    ready = tight(name, family, tmp_path)
    if ready.method.needs_shared_context:
        return
    contexts = [helpers.context(chunks, seed=chunks) for chunks in (6, 4, 5)]
    together = ready.method.encode(ready.model, contexts, ready.memory, ready.budget, **ready.asked)
    with ready.attach():
        logits = QueryBatch(ready.model, together, QUERIES).logits
        for row, (one, query) in enumerate(zip(contexts, QUERIES, strict=True)):
            alone = ready.method.encode(ready.model, one, ready.memory, ready.budget, **ready.asked)
            expected = QueryBatch(ready.model, alone, [query]).logits[0]
            torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=0)


@each_pair
def test_two_contexts_in_a_row_do_not_mix(name: str, family: str, tmp_path: Path) -> None:
    ready = tight(name, family, tmp_path / "first")
    alone = ready.logits(QUERIES)
    other = helpers.context(seed=2)
    traces = [tokens(8, seed=s) for s in range(8)]
    second = Ready(ready.method, ready.model, other, tmp_path / "second", ready.budget, traces)
    assert torch.equal(ready.logits(QUERIES), alone)
    if name != "no_context":
        assert not torch.allclose(second.logits(QUERIES), alone, atol=1e-3)
    for counter in ready.method.expects:
        assert second.cache.counters[counter] > 0


@each_pair
def test_memory_round_trip(name: str, family: str, tmp_path: Path) -> None:
    ready = tight(name, family, tmp_path)
    if ready.memory is None:
        assert not ready.method.needs_calibration
        return
    ready.memory.save(tmp_path / "saved")
    loaded = type(ready.memory).load(tmp_path / "saved", {"context": ready.context.key})
    cache = ready.method.encode(ready.model, ready.context, loaded, ready.budget)
    with ready.method.attach(ready.model, loaded):
        logits = QueryBatch(ready.model, cache, QUERIES).logits
    assert torch.equal(logits, ready.logits(QUERIES))
    with pytest.raises(UserError, match="built for context="):
        type(ready.memory).load(tmp_path / "saved", {"context": "another"})


@each_pair
def test_without_a_kvexp_cache_the_model_refuses(name: str, family: str, tmp_path: Path) -> None:
    method, model = built(name), helpers.model(family)
    with method.attach(model), pytest.raises(RuntimeError, match="no kvexp cache"):
        model(torch.tensor([list(QUERIES[0])]))


@pytest.mark.parametrize(("name", "family"), REFUSED)
def test_refused_pairs(name: str, family: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=REFUSED[name, family]):
        tight(name, family, tmp_path)


@pytest.mark.parametrize("name", METHODS)
def test_yaml_holds_every_knob_with_its_default(name: str) -> None:
    method = built(name)
    assert METHODS[name].keys() - {"_target_"} == {field.name for field in fields(method)}
    assert method == type(method)()
    assert method.id == name and method.family


def test_memory_type_is_checked_by_its_context(tmp_path: Path) -> None:
    ready = tight("asm", "llama", tmp_path)
    assert isinstance(ready.memory, StateMemory)
    with pytest.raises(UserError, match="built for context="):
        ready.method.encode(ready.model, helpers.context(seed=9), ready.memory, ready.budget)
