"""Batches of queries on one encoded context, against a plain forward over each whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import helpers
from helpers import FAMILIES, plain_logits, tokens
from kvexp import tiny
from kvexp.attention.attach import attached
from kvexp.cache.kv_cache import KVCache, empty_cache, prefill
from kvexp.tasks.batch import QueryBatch
from kvexp_kernels.merge_states.reference import merge_many

CONTEXT = tokens(30, seed=1)
QUERIES = [tokens(n, seed=10 + n) for n in (5, 12, 1, 8)]
each_family = pytest.mark.parametrize("family", tiny.FAMILIES)
each_tested = pytest.mark.parametrize("family", FAMILIES)


def encoded(model: Any, ids: Any = CONTEXT) -> KVCache:
    with attached(model):
        return prefill(model, ids, empty_cache(model))


def check(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@each_family
@pytest.mark.parametrize("context", [CONTEXT, ()], ids=["context", "empty"])
def test_logits_are_those_of_a_plain_forward(family: str, context: Any) -> None:
    model = helpers.model(family)
    cache = encoded(model, context)
    expected = [plain_logits(model, [*context, *query])[-1] for query in QUERIES]
    for size in (1, 2, 3, 4):
        with attached(model):
            batch = QueryBatch(model, cache, QUERIES[:size])
        assert batch.logits.shape == (size, tiny.VOCABULARY) and batch.logits.dtype == torch.float32
        check(batch.logits, torch.stack(expected[:size]))
    assert cache.seen == len(context)


@each_family
@pytest.mark.parametrize("context", [CONTEXT, ()], ids=["context", "empty"])
def test_extending_by_unequal_rows(family: str, context: Any) -> None:
    model, more = helpers.model(family), [tokens(n, seed=20 + n) for n in (3, 1, 0, 9)]
    cache = encoded(model, context)
    with attached(model):
        batch = QueryBatch(model, cache, QUERIES)
        first = batch.extend(more)
        batch.extend([tokens(2, seed=30)] * 4)
        again = batch.extend(more)
    assert first.shape == (4, 9, tiny.VOCABULARY)
    assert torch.equal(again, first)  # the batch did not move
    for row, (query, some) in enumerate(zip(QUERIES, more, strict=True)):
        plain = plain_logits(model, [*context, *query, *some])
        check(first[row, : len(some)], plain[len(context) + len(query) :])


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    context=st.integers(0, 40),
    family=st.sampled_from(["gemma3_text", "gpt_oss", "mistral"]),
)
@settings(max_examples=40, deadline=None)
def test_any_lengths_around_a_sliding_window(lengths: list[int], context: int, family: str) -> None:
    model, ids = helpers.model(family), tokens(context, seed=context)
    queries = [tokens(n, seed=n + i) for i, n in enumerate(lengths)]
    cache = encoded(model, ids)
    with attached(model):
        batch = QueryBatch(model, cache, queries)
        after = batch.extend([query[:3] for query in queries])
    for row, query in enumerate(queries):
        plain = plain_logits(model, [*ids, *query, *query[:3]])
        check(batch.logits[row], plain[context + len(query) - 1])
        check(after[row, : len(query[:3])], plain[context + len(query) :])


@each_family
def test_greedy_continuations_are_those_of_generate(family: str) -> None:
    model, new = helpers.model(family), 12
    model.generation_config.eos_token_id = None
    cache = encoded(model)
    with attached(model):
        made, ends = QueryBatch(model, cache, QUERIES).generate(new, lambda ids: None)
    for row, query in enumerate(QUERIES):
        ids = torch.tensor([[*CONTEXT, *query]])
        plain = model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0)
        assert made[row] == plain[0, ids.shape[1] :].tolist()
    assert ends == ["length"] * 4


def test_each_row_stops_on_its_own() -> None:
    model = helpers.model("llama")
    cache = encoded(model)
    with attached(model):
        batch = QueryBatch(model, cache, QUERIES[:3])
        free, _ = batch.generate(8, lambda ids: None)
        limits = {free[0][0]: (3, "stop"), free[1][0]: (1, "eos"), free[2][0]: (99, "never")}
        assert len(limits) == 3

        def stopped(ids: list[int]) -> str | None:
            count, why = limits[ids[0]]
            return why if len(ids) >= count else None

        made, ends = batch.generate(8, stopped)
        again, _ = batch.generate(8, lambda ids: None)
    assert made == [free[0][:3], free[1][:1], free[2]]
    assert ends == ["stop", "eos", "length"]
    assert again == free


def test_decoding_ends_when_all_rows_have(monkeypatch: pytest.MonkeyPatch) -> None:
    model, forwards = helpers.model("llama"), []
    real = QueryBatch._forward
    monkeypatch.setattr(QueryBatch, "_forward", lambda *a: forwards.append(a[2].shape[1]) or real(*a))
    cache = encoded(model)
    with attached(model):
        batch = QueryBatch(model, cache, QUERIES)
        batch.generate(50, lambda ids: "stop" if len(ids) == 3 else None)
        assert forwards == [12, 1, 1]  # the third token comes with the second step's logits
        batch.generate(2, lambda ids: None)
        assert forwards == [12, 1, 1, 1]
        assert batch.generate(0, lambda ids: None) == ([[]] * 4, ["length"] * 4)


@each_tested
def test_observers_see_states_that_merge_into_the_output(family: str) -> None:
    model = helpers.model(family)
    cache, seen = encoded(model), []
    with attached(model, tap=True):
        batch = QueryBatch(model, cache, QUERIES)
        batch.extend([[5, 6]] * 4, lambda *told: seen.append(told))
        count = len(seen)
        batch.extend([[5, 6]] * 4)
    full = [index for index, layer in enumerate(cache.layers) if layer.window is None]
    assert [call.layer_index for _, call, _, _ in seen] == full and len(seen) == count
    for layer, call, before, local in seen:
        assert len(before) == 2  # the context and the queries
        for a, s in (*before, local):
            assert a.shape == (*call.query.shape[:3], call.value.shape[-1])
            assert s.shape == call.query.shape[:3]
        assert call.query_pre is not None
        states = [*before, local]
        merged = merge_many(torch.stack([a for a, _ in states]), torch.stack([s for _, s in states]))
        layer.observer = None
        torch.testing.assert_close(layer.attend(call), merged, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("context", [CONTEXT, ()], ids=["context", "empty"])
def test_pads_move_no_position(context: Any) -> None:
    model, given = helpers.model("llama"), []
    cache = encoded(model, context)
    hook = model.register_forward_pre_hook(lambda m, a, k: given.append(k), with_kwargs=True)
    with attached(model):
        batch = QueryBatch(model, cache, [[7, 8, 9], [3]])
        batch.extend([[4], [5, 6]])
        batch.generate(2, lambda ids: None)
    hook.remove()
    n = len(context)
    assert given[0]["position_ids"][0].tolist() == [n, n + 1, n + 2]
    assert given[0]["position_ids"][1, 2].item() == n
    assert given[0]["attention_mask"][1].tolist() == [True] * n + [False, False, True]
    assert batch.next_position.tolist() == [[n + 3], [n + 1]]
    assert given[1]["position_ids"].tolist() == [[n + 3, n + 4], [n + 1, n + 2]]
    assert given[1]["attention_mask"][:, -2:].tolist() == [[True, False], [True, True]]
    assert given[2]["position_ids"].tolist() == [[n + 3], [n + 1]]
    assert given[2]["attention_mask"].shape == (2, n + 4)


def test_without_pads_no_mask_is_passed() -> None:
    model, masks = helpers.model("llama"), []
    cache = encoded(model)
    hook = model.register_forward_pre_hook(
        lambda m, a, k: masks.append(k["attention_mask"] is not None), with_kwargs=True
    )
    with attached(model):
        batch = QueryBatch(model, cache, [[7, 8], [3, 4]])
        batch.extend([[5, 6], [5, 6]])
        batch.generate(2, lambda ids: None)
        batch.extend([[5, 6], [5]])
    hook.remove()
    assert masks == [False, False, False, True]


def test_logits_keep_the_precision_that_is_above_float32() -> None:
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        model = tiny.build("llama").to(dtype)
        cache = encoded(model)
        with attached(model):
            batch = QueryBatch(model, cache, QUERIES)
            assert batch.logits.dtype == batch.extend([[1]] * 4).dtype == expected
        if dtype == torch.float64:
            plain = plain_logits(model, [*CONTEXT, *QUERIES[0]])[-1]
            check(batch.logits[0], plain)  # the model itself takes norms and its softmax in float32


@pytest.mark.parametrize("queries", [[[]], [[1, 2], []]])
def test_a_query_without_a_token_is_refused(queries: list[list[int]]) -> None:
    model = helpers.model("llama")
    with attached(model), pytest.raises(ValueError, match="a query has no token"):
        QueryBatch(model, empty_cache(model), queries)
