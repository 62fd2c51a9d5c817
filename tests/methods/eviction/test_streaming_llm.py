from __future__ import annotations

from typing import Any

import pytest
import torch

import helpers
from evict import PROMPTS, Event, Reference, by_hand, each_setting, hold, layer_by_hand, watched
from helpers import tokens
from kvexp import tiny
from kvexp.attention.options import Options, set_options
from kvexp.attention.rope import rotate
from kvexp.errors import UserError
from kvexp.methods.eviction.streaming_llm import StreamingLLM
from kvexp.tasks.batch import QueryBatch

IN_CACHE = StreamingLLM(rope="in_cache")
ONE_LAYER: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "olmo2": {},
    "glm4": {},
    "glm4_moe": {},
    "phi3": {},
    "deepseek_v3": {},
    "glm4_moe_lite": {"mlp_layer_types": ["dense"]},
}


def one_layer(family: str, **changes: Any) -> Any:
    """A model whose rows know nothing of the tokens before them: only where they stand makes a difference."""
    changes = {"num_hidden_layers": 1, **ONE_LAYER[family], **changes}
    return tiny.build(family, changes=changes)


def reference(budget: int, sinks: int = 4) -> Reference:
    def kept(events: list[Event]) -> list[list[list[int]]]:
        return [
            [[*range(sinks), *range(event.upcoming - budget + sinks, event.upcoming)] for _ in event.keys]
            for event in events
            if event.forward == events[-1].forward
        ]

    return kept


@each_setting
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_keeps_what_the_reference_keeps(family: str, dtype: torch.dtype) -> None:
    for prompts in (PROMPTS[:1], PROMPTS):
        for method in (StreamingLLM(), IN_CACHE):
            for sequence in watched(method, family, prompts, 12, 8, dtype):
                assert hold(sequence, reference(12)) >= 16  # 2 layers, prompt end and every step
        for sequence in watched(StreamingLLM(interval=3, sinks=2), family, prompts, 12, 8, dtype):
            assert hold(sequence, reference(12, sinks=2)) >= 4


@pytest.mark.parametrize("rope", ["original", "in_cache"])
def test_sinks_survive_50_compressions_with_the_exact_window(rope: str) -> None:
    [events] = watched(StreamingLLM(rope=rope), "llama", PROMPTS[:1], 16, 52)  # type: ignore[arg-type]
    compressed = [event for event in events if event.place == 0 and event.evicts]
    assert len(compressed) >= 51
    for event in compressed:
        assert event.kept == [[0, 1, 2, 3, *range(event.upcoming - 12, event.upcoming)]] * len(event.keys)


def test_by_hand() -> None:
    """Of 7 tokens, 5 rows: 0 to 3 and the latest; after two more the latest is 8; with one sink 0, 5 to 8."""
    prompt, one = (torch.ones(2, 7, 2),) * 3, (torch.ones(2, 1, 2),) * 3
    assert by_hand(StreamingLLM(), [prompt], 5) == [[0, 1, 2, 3, 6]] * 2
    assert by_hand(StreamingLLM(), [prompt, one, one], 5) == [[0, 1, 2, 3, 8]] * 2
    assert by_hand(StreamingLLM(sinks=1), [prompt, one, one], 5) == [[0, 5, 6, 7, 8]] * 2
    # Every second step: 8 rows are 5 + 3, so nothing is due at interval 4, and 7 would stay.
    assert by_hand(StreamingLLM(sinks=1, interval=4), [prompt, one, one], 5) == [[0, 3, 4, 5, 6, 7, 8]] * 2


def tables() -> list[Any]:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"original_max_position_embeddings": 64, "rope_theta": 500000.0}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    cases = {family: one_layer(family) for family in ("llama", "glm4", "phi3")}
    cases["llama3"] = one_layer("llama", rope_parameters=llama3)
    cases["yarn"] = one_layer("llama", rope_parameters=yarn)
    return [pytest.param(model, id=name) for name, model in cases.items()]


@pytest.mark.parametrize("model", tables())
def test_scores_are_those_of_rows_rotated_by_their_place_in_the_cache(model: Any) -> None:
    numbers = torch.Generator().manual_seed(0)
    width = model.config.head_dim
    prompt, one = (3, 20), (3, 1)
    steps = [
        tuple(torch.randn(*shape, width, generator=numbers) for _ in range(3))
        for shape in (prompt, *[one] * 31)
    ]
    layer = layer_by_hand(IN_CACHE, steps, 9, model=model)
    assert layer.positions[0, 0].tolist() == [0, 1, 2, 3, 46, 47, 48, 49, 50]
    keys = torch.cat([step[1] for step in steps], dim=1)[:, layer.positions[0, 0].tolist()]
    query = torch.randn(1, 3, 1, width, generator=numbers)
    by_place = rotate(model, keys[None], torch.arange(9), 0, scaled=True)
    expected = rotate(model, query, torch.tensor([9]), 0, scaled=True) @ by_place.mT
    ours = rotate(model, query, torch.tensor([51]), 0, scaled=True) @ layer.keys.mT
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-5)
    plain = layer_by_hand(StreamingLLM(), steps, 9, model=model)
    assert torch.equal(plain.keys[:, :, 4:], layer.keys[:, :, 4:])
    assert not torch.allclose(plain.keys[:, :, :4], layer.keys[:, :, :4], atol=0.1)


def test_nothing_adds_up_over_many_moves() -> None:
    """The keys after 200 moves are those of one move by as much, to the last bit."""
    model, numbers = one_layer("llama"), torch.Generator().manual_seed(0)
    rows = [torch.randn(2, 220, 16, generator=numbers) for _ in range(3)]
    parts = [tuple(x[:, :20] for x in rows)]
    parts += [tuple(x[:, i : i + 1] for x in rows) for i in range(20, 220)]
    stepwise = layer_by_hand(IN_CACHE, parts, 9, model=model)
    at_once = layer_by_hand(IN_CACHE, [tuple(rows)], 9, model=model)
    assert torch.equal(stepwise.positions, at_once.positions)
    assert torch.equal(stepwise.keys[:, :, :4], at_once.keys[:, :, :4])


def retained(seen: int, budget: int, interval: int) -> list[int]:
    """Positions held before the next token, after a prompt of 24 and single steps."""
    held = list(range(24)) if budget >= 24 else [*range(4), *range(24 - budget + 4, 24)]
    for position in range(24, seen):
        held.append(position)
        if len(held) >= budget + interval:
            held = [*held[:4], *held[len(held) - budget + 4 :]]
    return held


@pytest.mark.parametrize("interval", [1, 5])
@pytest.mark.parametrize("family", ONE_LAYER)
@torch.no_grad()
def test_one_layer_answers_as_if_only_the_kept_tokens_had_been_read(family: str, interval: int) -> None:
    """The logits are those of the plain model on the retained tokens at the positions 0 to n - 1."""
    model, ids, budget = one_layer(family), helpers.tokens(50, seed=3), 11
    method = StreamingLLM(rope="in_cache", interval=interval)
    cache = method.encode(model, ids[:24], budget=budget)
    with method.attach(model):
        ours = [model(torch.tensor([[ids[at]]]), cache=cache).logits[0, -1] for at in range(24, 50)]
    for at, logits in enumerate(ours, start=24):
        places = [ids[p] for p in retained(at, budget, interval)]
        plain = helpers.plain_logits(model, [*places, ids[at]])[-1]
        torch.testing.assert_close(logits, plain, atol=2e-4, rtol=0)
    elsewhere = StreamingLLM(interval=interval)
    cache = elsewhere.encode(model, ids[:24], budget=budget)
    with elsewhere.attach(model):
        logits = model(torch.tensor([[ids[24]]]), cache=cache).logits[0, -1]
    assert not torch.allclose(logits, ours[0], atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_padded_batch_answers_as_its_sequences_alone(family: str) -> None:
    """Sequences of which some have lost rows, one has few more than the sinks, and one has fewer."""
    model = helpers.model(family)
    contexts = [helpers.Context((), (helpers.tokens(n, seed=n),)) for n in (40, 6, 23, 2)]
    queries = [helpers.tokens(n, seed=n) for n in (3, 4, 1, 2)]
    method = StreamingLLM(rope="in_cache", interval=2)
    cache = method.encode(model, contexts, budget=9)
    with method.attach(model):
        together = QueryBatch(model, cache, queries).generate(20, lambda made: None)[0]
        picked = QueryBatch(model, cache, [queries[0], queries[3]], rows=[0, 3])
        assert picked.generate(20, lambda made: None)[0] == [together[0], together[3]]
        for context, query, answer in zip(contexts, queries, together, strict=True):
            alone = QueryBatch(model, method.encode(model, context, budget=9), [query])
            assert alone.generate(20, lambda made: None)[0] == [answer]


def test_forks_and_chunks_move_their_own_sinks() -> None:
    model, query = helpers.model("llama"), helpers.tokens(3, seed=5)
    cache = IN_CACHE.encode(model, helpers.context(), budget=9)
    with IN_CACHE.attach(model):
        first = QueryBatch(model, cache, [query])
        before = first.logits
        first.generate(12, lambda made: None)
        assert torch.equal(QueryBatch(model, cache, [query]).logits, before)
        batch = QueryBatch(model, cache, [query, helpers.tokens(5, seed=6)])
        torch.testing.assert_close(batch.logits[:1], before, atol=1e-4, rtol=0)
    set_options(model, Options(prefill_chunk=7))
    try:
        parts = IN_CACHE.encode(model, helpers.context(), budget=9)
    finally:
        set_options(model, Options())
    for one, other in zip(parts.layers, cache.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, atol=1e-4, rtol=0)


def test_places_in_the_cache_are_refused_where_they_cannot_work() -> None:
    with pytest.raises(UserError, match=r"method.rope=in_cache .* use method.rope=original"):
        StreamingLLM(rope="in_cache", protect_prompt=True)
    for family, reason in (("gpt_oss", "sliding window"), ("smollm3", "no positions")):
        model = helpers.model(family)
        with pytest.raises(UserError, match=rf"{reason} in this '{family}' model: use method.rope=original"):
            IN_CACHE.encode(model, helpers.context(), budget=9)
        assert StreamingLLM().encode(model, helpers.context(), budget=9).counters["evicted"] > 0


def test_the_budget_must_hold_more_than_the_sinks() -> None:
    with pytest.raises(
        UserError, match=r"budget=4 leaves streaming_llm nothing to choose .* budget=5 or more"
    ):
        StreamingLLM().encode(helpers.model("llama"), helpers.context(), budget=4)


@pytest.mark.parametrize("steps", [1, 3])
def test_rows_that_leave_in_place_are_those_that_are_chosen(steps: int, monkeypatch: Any) -> None:
    model, found = helpers.model("llama"), []
    for in_place in (True, False):
        method = StreamingLLM(interval=steps)
        if not in_place:
            monkeypatch.setattr(StreamingLLM, "oldest_first", False)
        cache = method.encode(model, tokens(30, seed=3), budget=16)
        places, kept = set(), []
        with method.attach(model):
            for at in range(200):
                model(torch.tensor([[at % 90]]), cache=cache)
                layer = cache.layers[1]
                places.add(layer.keys.untyped_storage().data_ptr())
                if at % 41 == 0:
                    kept.append([layer.slots.tolist(), layer.positions.tolist(), layer.keys.clone()])
        found.append((kept, cache.evictor.usage(), dict(cache.counters), cache.nbytes()))
        assert len(places) < 5
    for (slots, positions, keys), (true_slots, true_positions, true_keys) in zip(
        found[0][0], found[1][0], strict=True
    ):
        assert positions[0][0] == true_positions[0][0] and slots[0][0] == true_slots[0][0]
        torch.testing.assert_close(keys, true_keys)
    assert found[0][1:] == found[1][1:]


@pytest.mark.parametrize("twice", [False, True])
def test_rows_of_an_encoded_context_leave_a_fork_in_place(twice: bool, monkeypatch: Any) -> None:
    """A fork, or the fork of one that has gone on, at its first steps; nobody else's rows change."""
    model, found = helpers.model("llama"), []
    for in_place in (True, False):
        method = StreamingLLM()
        if not in_place:
            monkeypatch.setattr(StreamingLLM, "oldest_first", False)
        cache = method.encode(model, tokens(30, seed=3), budget=16)
        states = []
        with method.attach(model):
            if twice:
                cache = cache.fork()
                model(torch.tensor([[5]]), cache=cache)
            before = cache.layers[1].keys.clone()
            fork = cache.fork()
            for at in range(3):
                logits = model(torch.tensor([[at], [at + 9]]), cache=fork).logits
                layer = fork.layers[1]
                states.append([logits, layer.keys.clone(), layer.values.clone(), *_places(layer)])
                assert at or layer.drops is in_place
        assert torch.equal(cache.layers[1].keys, before)
        found.append((states, fork.evictor.usage(), dict(fork.counters), fork.entries(), fork.nbytes()))
    for state, expected in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(state, expected)
    assert found[0][1:] == found[1][1:]


def _places(layer: Any) -> list[torch.Tensor]:
    return [x.expand(layer.keys.shape[:3]).clone() for x in (layer.slots, layer.positions)]


def test_a_fork_keeps_its_rows_when_those_of_its_parent_leave() -> None:
    model, method = helpers.model("llama"), StreamingLLM()
    cache = method.encode(model, tokens(30, seed=3), budget=16)
    with method.attach(model), torch.no_grad():
        for at in range(5):
            model(torch.tensor([[at]]), cache=cache)
        fork = cache.fork()
        expected = model(torch.tensor([[7]]), cache=cache.fork()).logits
        for at in range(9):
            model(torch.tensor([[at]]), cache=cache)
        torch.testing.assert_close(model(torch.tensor([[7]]), cache=fork).logits, expected)
