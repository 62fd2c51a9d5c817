"""The cache of a whole model: forks, beams, bytes, prefill in chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import helpers
from helpers import FAMILIES, plain_logits, tokens
from kvexp import tiny
from kvexp.attention import families
from kvexp.attention.attach import attached
from kvexp.attention.options import Options, options_of, set_options
from kvexp.cache.dense import DenseLayer
from kvexp.cache.kv_cache import KVCache, empty_cache, prefill, row_bytes
from kvexp.cache.virtual import Virtual
from kvexp.tasks.batch import QueryBatch

CONTEXT = tokens(30, seed=1)
each_family = pytest.mark.parametrize("family", tiny.FAMILIES)


def encoded(model: Any, ids: Any = CONTEXT) -> KVCache:
    with attached(model):
        return prefill(model, ids, empty_cache(model))


def run(model: Any, cache: KVCache, ids: Any) -> torch.Tensor:
    with attached(model), torch.no_grad():
        return model(torch.tensor([list(ids)]), cache=cache).logits[0]


@each_family
@pytest.mark.parametrize("chunk", [1, 7, 1024])
def test_prefill_in_chunks_equals_a_plain_forward(family: str, chunk: int) -> None:
    model, query = tiny.build(family), tokens(5)
    assert options_of(model) == Options(backend="auto", prefill_chunk=1024)
    set_options(model, Options(prefill_chunk=chunk))
    cache = encoded(model)
    assert cache.seen == 30 and {layer.get_seq_length() for layer in cache.layers} == {30}
    ours = run(model, cache, query)
    torch.testing.assert_close(ours, plain_logits(model, [*CONTEXT, *query])[30:], atol=1e-4, rtol=0)


def test_prefill_goes_on_from_what_was_seen() -> None:
    model = helpers.model("qwen3")
    cache = encoded(model, CONTEXT[:11])
    with attached(model):
        prefill(model, CONTEXT[11:], cache)
        prefill(model, [], cache)
    whole = encoded(model)
    for layer, other in zip(cache.layers, whole.layers, strict=True):
        assert torch.equal(layer.positions, other.positions) and torch.equal(layer.slots, other.slots)
        torch.testing.assert_close(layer.keys, other.keys, atol=1e-5, rtol=1e-5)


@each_family
def test_forks_and_parent_go_their_own_ways(family: str) -> None:
    model = helpers.model(family)
    parent = encoded(model)
    one, other = parent.fork(), parent.fork()
    run(model, one, tokens(4, seed=5))
    run(model, parent, tokens(12, seed=6))
    nested = other.fork()
    run(model, nested, tokens(3, seed=8))
    query = tokens(5)
    expected = plain_logits(model, [*CONTEXT, *query])[30:]
    torch.testing.assert_close(run(model, other, query), expected, atol=1e-4, rtol=0)
    assert (parent.seen, one.seen, other.seen, nested.seen) == (42, 34, 35, 33)


@each_family
def test_beams_over_an_encoded_context(family: str) -> None:
    model = helpers.model(family)
    ids = torch.tensor([[*CONTEXT, *tokens(4, seed=s)] for s in (2, 3)])
    options = {"num_beams": 3, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    model.generation_config.eos_token_id = None
    plain = model.generate(ids, **options)
    cache = encoded(model)
    cache.batch_repeat_interleave(3)  # of the context, where it changes nothing
    fork = cache.fork()
    with attached(model):
        ours = model.generate(ids, cache=cache, **options)
        assert torch.equal(ours, plain)
        assert torch.equal(model.generate(ids, cache=fork, **options), plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_over_a_padded_batch(family: str) -> None:
    # The batch's own rows are shared rows of its fork, and have to follow the beams as well.
    model, queries = helpers.model(family), [tokens(6, seed=2), tokens(3, seed=3)]
    options = {"num_beams": 2, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    model.generation_config.eos_token_id = None
    ids, mask = torch.zeros(2, 37, dtype=torch.long), torch.zeros(2, 37, dtype=torch.long)
    plain = []
    for row, query in enumerate(queries):
        real = [*CONTEXT, *query, 7]
        columns = [*range(30), *range(36 - len(query), 37)]
        ids[row, columns], mask[row, columns] = torch.tensor(real), 1
        plain.append(model.generate(torch.tensor([real]), **options)[0, len(real) :])
    with attached(model):
        cache = QueryBatch(model, encoded(model), queries).cache.fork()
        cache.batch_repeat_interleave(2)
        ours = model.generate(ids, cache=cache, attention_mask=mask, **options)[:, 37:]
    assert torch.equal(ours, torch.stack(plain))


@each_family
def test_row_bytes_are_what_a_token_takes_in_full_layers(family: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = helpers.model(family, dtype)
        few, many = (encoded(model, tokens(n)) for n in (3, 8))
        full = [
            sum(layer.nbytes() for layer in cache.layers if layer.window is None) for cache in (few, many)
        ]
        assert full[1] - full[0] == 5 * row_bytes(model)
        assert full[1] == 8 * row_bytes(model)


def test_row_bytes_by_hand() -> None:
    # Llama: 3 layers, 2 KV heads of 16 numbers, keys and values, 4 bytes. MLA: 2 layers of 16 + 8 numbers.
    assert row_bytes(helpers.model("llama")) == 3 * 2 * 16 * 2 * 4
    assert row_bytes(helpers.model("deepseek_v3")) == 2 * (16 + 8) * 4
    assert row_bytes(helpers.model("mistral")) == 0


def test_shared_tensors_are_counted_once() -> None:
    model = helpers.model("gpt_oss")  # a sliding and a full layer
    cache = encoded(model)
    held = cache.nbytes()
    assert held == sum(layer.nbytes() for layer in cache.layers)
    assert [fork.nbytes() for fork in (cache.fork(), cache.fork().fork())] == [held, held]

    class Book:
        entries = 4

        def tensors(self) -> list[torch.Tensor]:
            return [table]

    table = torch.zeros(4, 8)
    layers = [DenseLayer((Virtual(Book(), {}, 9),), seen=9) for _ in range(3)]  # type: ignore[arg-type]
    assert [layer.nbytes() for layer in layers] == [128, 128, 128]
    assert KVCache(layers).nbytes() == 128
    assert KVCache(layers).entries() == [4, 4, 4]


def test_entries_are_those_of_full_layers() -> None:
    model = helpers.model("gemma3_text")  # sliding, full, sliding
    cache = encoded(model)
    assert cache.entries() == [30]
    fork = cache.fork()
    run(model, fork, tokens(5))
    assert (fork.entries(), cache.entries()) == ([35], [30])
    assert all(layer.rows < 2 * 8 + 30 for layer in cache.layers if layer.window is not None)


def test_sliding_layers_hold_less_than_two_windows() -> None:
    model = tiny.build("gemma3_text")
    set_options(model, Options(prefill_chunk=4))
    cache = encoded(model, tokens(100))
    assert [layer.rows < 16 for layer in cache.layers] == [True, False, True]
    assert [layer.get_seq_length() for layer in cache.layers] == [100] * 3


def test_layers_get_window_and_backend_of_the_model() -> None:
    model = tiny.build("gpt_oss")
    set_options(model, Options(backend="reference"))
    layers = empty_cache(model).layers
    assert [layer.window for layer in layers] == list(families.layer_windows(model.config)) == [8, None]
    assert all(layer.backend == "reference" for layer in layers)


def test_observers_sit_on_full_layers_of_one_fork() -> None:
    model = helpers.model("gemma3_text")
    cache = encoded(model)
    fork, seen = cache.fork(), []
    fork.observe(lambda layer, call, before, local: seen.append((call.layer_index, len(before))))
    run(model, fork, tokens(2))
    run(model, cache.fork(), tokens(2))
    run(model, fork.fork(), tokens(2))
    assert seen == [(1, 1)]
    fork.observe(None)
    run(model, fork, tokens(2))
    assert len(seen) == 1


def test_forks_share_their_counters() -> None:
    cache = KVCache([DenseLayer()])
    fork = cache.fork().fork()
    fork.counters["evicted"] = 3
    assert cache.counters == {"evicted": 3}
    assert KVCache([DenseLayer()]).counters == {}


def test_layers_may_lie_on_different_devices() -> None:
    cache = KVCache([DenseLayer(), DenseLayer()])
    row = torch.ones(1, 1, 2, 4)
    position = torch.arange(2)[None]
    cache.layers[0].update(row, row, kwargs={"position_ids": position})
    cache.layers[1].update(row.to("meta"), row.to("meta"), kwargs={"position_ids": position})
    fork = cache.fork()
    for index, device in enumerate(("cpu", "meta")):
        fork.layers[index].update(row.to(device), row.to(device), kwargs={"position_ids": position + 2})
        layer = fork.layers[index]
        held = (layer.keys, layer.slots, layer.positions, layer.q_slots, layer.q_positions)
        assert {x.device.type for x in (*held, *layer.tensors())} == {device}
    fork.batch_repeat_interleave(2)
    assert fork.seen == 4 and fork.get_seq_length(1) == 4


def test_a_model_that_is_not_attached_is_noticed_in_its_first_forward() -> None:
    model = tiny.build("llama")
    model.set_attn_implementation("sdpa")
    cache = encoded(model)
    fork = cache.fork()
    with pytest.raises(RuntimeError, match=r"use `with method\.attach\(model\)`"):
        model(torch.tensor([[5]]), cache=fork)
    with pytest.raises(RuntimeError, match="ran without its method, or broke off"):
        run(model, fork, [5])
    with pytest.raises(RuntimeError, match="a cache that was encoded anew"):
        fork.fork()
    expected = plain_logits(model, [*CONTEXT, 5])[30:]
    torch.testing.assert_close(run(model, cache.fork(), [5]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [5, 30, 32])
@pytest.mark.parametrize("masked", [False, True])
def test_ids_that_do_not_go_on_from_the_cache_are_refused(length: int, masked: bool) -> None:
    model = helpers.model("llama")
    model.generation_config.eos_token_id = None
    ids = torch.tensor([[*CONTEXT, 1, 2][:length]])
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    if masked:
        ids, mask = ids.expand(2, -1), torch.ones(2, length, dtype=torch.long)
        mask[1, 30:31] = 0
        options["attention_mask"] = mask
    cache = encoded(model)
    with attached(model):
        if length > 30:  # the first use is right, and the second finds what the first has left
            model.generate(ids, cache=cache, **options)
        with pytest.raises(RuntimeError, match=rf"has seen {cache.seen} tokens.*a fork of the cache"):
            model.generate(ids, cache=cache, **options)
