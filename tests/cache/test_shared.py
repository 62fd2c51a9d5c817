"""Rows that many queries share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import helpers
from kvexp.attention.attach import attached
from kvexp.attention.function import Call, Padding
from kvexp.cache.dense import DenseLayer
from kvexp.cache.kv_cache import KVCache, empty_cache, prefill
from kvexp.cache.shared import SharedRows


def shared(batch: int, rows: int, seed: int = 0, start: int = 0) -> SharedRows:
    numbers = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(batch, 2, rows, 4, generator=numbers) for _ in range(2))
    slots = torch.arange(start, start + rows)
    positions = slots + torch.arange(batch)[:, None]
    return SharedRows(keys, values, slots, positions, (start, start + rows))


def call(batch: int, length: int, columns: torch.Tensor | None = None, module: Any = None) -> Call:
    query = torch.randn(batch, 6, length, 4, generator=torch.Generator().manual_seed(7))
    empty = query[:, :2, :0]
    module = module or nn.Identity()
    return Call(module, query, empty, empty, 0.5, None, Padding(columns), None, True)


def by_row(rows: SharedRows, asked: Call, real: torch.Tensor | None = None) -> Any:
    """Softmax over each sequence's rows on its own."""
    outputs, masses = [], []
    for b, query in enumerate(asked.query):
        own = min(b, rows.keys.shape[0] - 1)
        keep = torch.ones(rows.entries, dtype=torch.bool) if real is None else real[b]
        key, value = (x[own, :, keep].repeat_interleave(3, 0) for x in (rows.keys, rows.values))
        scores = query @ key.mT * 0.5
        outputs.append(scores.softmax(-1) @ value)
        masses.append(scores.logsumexp(-1))
    return torch.stack(outputs), torch.stack(masses)


@given(batch=st.integers(1, 4), length=st.integers(1, 5), rows=st.integers(1, 8), several=st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_query_attends_to_all_rows(batch: int, length: int, rows: int, several: bool) -> None:
    source, asked = shared(batch if several else 1, rows), call(batch, length)
    a, s = source.state(asked, DenseLayer())
    expected = by_row(source, asked)
    torch.testing.assert_close((a, s), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("batch", [1, 3])
def test_pads_among_the_rows_are_left_out(batch: int) -> None:
    columns = torch.ones(3, 9, dtype=torch.bool)
    columns[1, 2:4] = columns[2, 3] = False
    source, asked = shared(batch, 6), call(3, 3, columns)
    a, s = source.state(asked, DenseLayer())
    torch.testing.assert_close((a, s), by_row(source, asked, columns[:, :6]), atol=1e-5, rtol=1e-5)


def test_one_context_is_read_as_one_long_query(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    original = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attend(query: Any, key: Any, value: Any, *rest: Any, **keywords: Any) -> Any:
        shapes.append((tuple(query.shape), tuple(key.shape), keywords["attn_mask"] is None))
        return original(query, key, value, *rest, **keywords)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", attend)
    columns = torch.ones(4, 9, dtype=torch.bool)
    columns[0, 7] = False  # a pad of the queries, behind the shared rows
    shared(1, 6).state(call(4, 3, columns), DenseLayer())
    assert shapes == [((1, 6, 12, 4), (1, 2, 6, 4), True)]


def test_a_layer_chooses_the_backend() -> None:
    source, asked = shared(1, 5), call(2, 3)
    results = [source.state(asked, DenseLayer(backend=name)) for name in ("reference", "flash")]
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-5)


def test_choosing_sequences() -> None:
    source, one = shared(3, 4), shared(1, 4)
    chosen = source.select(torch.tensor([2, 0]))
    assert (chosen.batch, chosen.entries, chosen.span) == (2, 4, (0, 4))
    assert torch.equal(chosen.keys, source.keys[[2, 0]]) and torch.equal(chosen.values, source.values[[2, 0]])
    assert torch.equal(chosen.positions, source.positions[[2, 0]])
    assert one.select(torch.tensor([0, 0])) is one


def test_latents_are_expanded_by_the_module() -> None:
    latent = SharedRows(
        torch.ones(1, 1, 3, 5), torch.zeros(1, 1, 3, 2), torch.arange(3), torch.arange(3)[None], (0, 3)
    )
    expanded = shared(1, 3)
    module = nn.Identity()
    module.expand_kv = lambda keys, values: (expanded.keys, expanded.values)  # type: ignore[assignment]
    asked = call(2, 2, module=module)
    torch.testing.assert_close(latent.state(asked, DenseLayer()), expanded.state(asked, DenseLayer()))
    assert latent.tensors()[0].shape[-1] == 5  # what is held, and counted, are the latents


@pytest.mark.parametrize("family", helpers.FAMILIES)
def test_shared_rows_hold_what_the_context_holds(family: str) -> None:
    model, ids = helpers.model(family), helpers.tokens(20)
    with attached(model):
        context = prefill(model, ids, empty_cache(model))
    fork = context.fork()
    assert isinstance(fork, KVCache)
    for layer, twin in zip(context.layers, fork.layers, strict=True):
        if layer.window is None:
            assert [t.data_ptr() for t in twin.tensors()] == [t.data_ptr() for t in layer.tensors()]
            assert twin.rows == 0 and twin.entries() == layer.rows == 20
    assert fork.nbytes() == context.nbytes()


def test_a_source_needs_no_module_of_a_kind() -> None:
    # Only MLA modules expand; whatever else stands behind a call is not asked.
    asked = call(1, 1, module=SimpleNamespace(layer_idx=3))
    assert asked.layer_index == 3
    assert shared(1, 2).expanded(asked)[0].shape == (1, 2, 2, 4)


@pytest.mark.parametrize("forked", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("family", ["llama", "mistral", "deepseek_v3"])
def test_pads_in_front_of_an_encoded_context_are_refused(family: str, batch: int, forked: bool) -> None:
    # Left padding as tokenizers do it: the context's rows would be read at the wrong columns.
    model, ids = helpers.model(family), helpers.tokens(5)
    model.generation_config.eos_token_id = None
    rows = torch.tensor([[0, 0, *ids, 7, 8], [*ids, 1, 2, 3, 4]])[:batch]
    mask = torch.ones_like(rows)
    mask[0, :2] = 0
    with attached(model):
        cache = prefill(model, ids, empty_cache(model))
        cache = cache.fork() if forked else cache
        with pytest.raises(RuntimeError, match="pads must stand between the context and the query"):
            model.generate(rows, attention_mask=mask, cache=cache, max_new_tokens=2, pad_token_id=0)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_batch_may_be_encoded_with_its_own_pads(batch: int) -> None:
    model, rows = helpers.model("llama"), [helpers.tokens(9, seed=s) for s in (1, 2)][:batch]
    ids, mask = torch.tensor(rows), torch.ones(batch, 9, dtype=torch.bool)
    mask[0, :2] = False
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with attached(model), torch.no_grad():
        cache = empty_cache(model)
        model(ids[:, :6], cache=cache, attention_mask=mask[:, :6], position_ids=positions[:, :6])
        ours = model(
            ids[:, 6:], cache=cache.fork(), attention_mask=mask, position_ids=positions[:, 6:]
        ).logits
    for row, pads in zip(range(batch), (2, 0), strict=False):
        torch.testing.assert_close(
            ours[row], helpers.plain_logits(model, rows[row][pads:])[-3:], atol=1e-4, rtol=0
        )
