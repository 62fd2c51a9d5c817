"""The partial forward: what has to be exact, on every family, and that its form changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import helpers
from helpers import FAMILIES, QUERIES, plain_logits
from kvexp.attention.options import Options, set_options
from kvexp.cache.chunk_store import Chunk, Exact
from kvexp.methods.reuse import patched
from kvexp.methods.reuse.agentkvshift import AgentKVShift
from kvexp.methods.reuse.agentkvshift_plus import AgentKVShiftPlus
from kvexp.methods.reuse.base import ReuseMethod
from kvexp.methods.reuse.cacheblend import CacheBlend
from kvexp.methods.reuse.encode import begun
from kvexp.methods.reuse.forward import Run
from kvexp.methods.reuse.full_recompute import FullRecompute
from kvexp.methods.reuse.geometry import Geometry
from kvexp.methods.reuse.patched import RowSet
from kvexp.methods.reuse.prophetkv import ProphetKV
from kvexp.methods.reuse.reposition import Reposition
from kvexp.methods.reuse.units import Encoder
from kvexp.prompt import Context
from kvexp.tasks.batch import QueryBatch

CONTEXTS = [helpers.context(chunks, seed=chunks) for chunks in (6, 4, 5)]
CPU = torch.device("cpu")
each_family = pytest.mark.parametrize("family", FAMILIES)
modes = pytest.mark.parametrize("encoded", ["behind_header", "alone", "old_context"])


@contextmanager
def at_work(method: ReuseMethod, family: str, contexts: list[Context]) -> Iterator[Run]:
    """A batch with its units placed, inside `attach`."""
    model = helpers.model(family)
    with method.attach(model), torch.no_grad():
        queries = [QUERIES[0]] * len(contexts) if method.needs_query else []
        yield begun(method, Encoder(model, method.opened(model)), Geometry.of(contexts, queries, CPU))


def logits(method: ReuseMethod, family: str, context: Any, memory: Any = None) -> torch.Tensor:
    model = helpers.model(family)
    cache = method.encode(model, context, memory, query=QUERIES[0])
    with method.attach(model):
        return QueryBatch(model, cache, QUERIES).logits


def full(family: str, context: Context) -> torch.Tensor:
    return torch.stack([plain_logits(helpers.model(family), [*context.ids, *q])[-1] for q in QUERIES])


@each_family
@modes
def test_at_layer_0_moved_rows_are_the_fresh_ones(family: str, encoded: Any) -> None:
    with at_work(Reposition(encoded=encoded), family, CONTEXTS) as run:
        work = run.start(run.reusable)
        fresh = work.peek(0)
        for new, old in zip(fresh, run.sheet.layer(0), strict=True):
            residual = (new - work.rows.take(old)) * work.rows.valid[:, None, :, None]
            assert residual.abs().max() < 2e-5
        deeper = run.sheet.layer(1)[0]
        assert (run.full()[1][0] - deeper)[:, :, : run.geometry.width].abs().max() > 0.1


@each_family
def test_a_unit_reused_behind_its_own_prefix_is_full_attention(family: str) -> None:
    context = Context(CONTEXTS[0].header, (CONTEXTS[0].ids[3:30],))
    torch.testing.assert_close(
        logits(Reposition(), family, context), full(family, context), atol=1e-4, rtol=0
    )
    headless = Context((), (CONTEXTS[0].ids[:20],))
    found = logits(Reposition(encoded="alone"), family, headless)
    torch.testing.assert_close(found, full(family, headless), atol=1e-4, rtol=0)


@each_family
def test_with_all_rows_it_is_full_attention(family: str) -> None:
    context = CONTEXTS[0]
    expected = full(family, context)
    for method in (
        FullRecompute(),
        AgentKVShift(recompute="1", encoded="alone"),
        AgentKVShift(recompute="1", at_check="fresh"),
        AgentKVShiftPlus(recompute="1", encoded="old_context", old_group=2),
        CacheBlend(recompute="1", by="both"),
        CacheBlend(recompute="1", gradual=True),
        ProphetKV(recompute="1"),
    ):
        torch.testing.assert_close(logits(method, family, context), expected, atol=1e-4, rtol=0)


def shifted_store(method: ReuseMethod, family: str, context: Context) -> tuple[Any, Any]:
    """A store whose rows are those of full recompute minus one vector for each unit, head and layer."""
    model, numbers = helpers.model(family), torch.Generator().manual_seed(0)
    store = method.opened(model)
    with at_work(method, family, [context]) as run:
        truth = run.full()
        for unit in run.geometry.units:
            rows = []
            for layer, (k, v) in enumerate(truth):
                k, v = k[0, :, unit.columns], v[0, :, unit.columns]
                if layer > 0:  # at layer 0 nothing can differ
                    angles = run.sheet.rotary.angles(
                        layer, torch.arange(unit.start, unit.start + unit.length)
                    )
                    move = torch.randn(k.shape[0], 1, k.shape[-1], generator=numbers).expand(k.shape)
                    k = k - (move if angles is None else angles.turn(move))
                    v = v - torch.randn(v.shape[0], 1, v.shape[-1], generator=numbers)
                rows.append(run.sheet.rotary.ordered(k, v))
            store.put(context.header, context.chunks[unit.at], Chunk.of(unit.start, rows, Exact()))
    return store, truth


@each_family
@pytest.mark.parametrize(
    "method",
    [
        AgentKVShift(weights="none"),
        AgentKVShift(weights="none", probes="random", recompute="0.3", first=2),
        AgentKVShift(clip=1e-3),
        AgentKVShiftPlus(recompute="0.3"),
    ],
    ids=["divergence", "random", "clipped", "plus"],
)
def test_a_constant_residual_is_repaired_exactly(family: str, method: AgentKVShift) -> None:
    context = CONTEXTS[0]
    store, _ = shifted_store(method, family, context)
    found = logits(method, family, context, store)
    torch.testing.assert_close(found, full(family, context), atol=2e-4, rtol=0)
    assert store.counts["misses"] == 1  # the header alone
    without = logits(CacheBlend(recompute="0.3"), family, context, store)
    assert not torch.allclose(without, full(family, context), atol=1e-2)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_permuted_units_are_all_found_and_placed(family: str) -> None:
    first = CONTEXTS[0]
    other = Context(first.header, tuple(reversed(first.chunks)))
    method = AgentKVShift()
    model = helpers.model(family)
    store = method.opened(model)
    method.encode(model, first, store)
    again = method.encode(model, other, store)
    assert (again.report.misses, again.report.hits) == (0, 6)  # type: ignore[attr-defined]
    anew = method.encode(model, other)
    for mine, theirs in zip(again.layers, anew.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
    whole = AgentKVShift(recompute="1")
    torch.testing.assert_close(logits(whole, family, other, store), full(family, other), atol=1e-4, rtol=0)


ALONE: Any = {
    "encoded": "alone",
    "recompute": "0.3",
}  # no unit is off by rounding alone, so choices are clear
REPAIRS: list[ReuseMethod] = [
    AgentKVShift(**ALONE),
    AgentKVShift(average="post", at_check="fresh", **ALONE),
    AgentKVShiftPlus(**ALONE),
    CacheBlend(**ALONE),
    CacheBlend(gradual=True, **ALONE),
    ProphetKV(**ALONE),
]


@pytest.mark.parametrize("method", REPAIRS, ids=lambda method: method.id)
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_blocks_and_chunks_change_nothing(
    family: str, method: ReuseMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = helpers.model(family)
    whole = method.encode(model, CONTEXTS, query=QUERIES[0])
    monkeypatch.setattr(patched, "BLOCK", 3)
    set_options(model, Options(prefill_chunk=5))
    try:
        parts = method.encode(model, CONTEXTS, query=QUERIES[0])
    finally:
        set_options(model, Options())
    for mine, theirs in zip(parts.layers, whole.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.values, theirs.values, atol=1e-4, rtol=1e-4)
    assert parts.counters == whole.counters


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_rows_see_what_stands_before_them(family: str) -> None:
    """Masks against one comparison at a time, for scattered rows of a padded batch."""
    geometry = Geometry.of(CONTEXTS, [QUERIES[0], QUERIES[1], QUERIES[2]], CPU)
    chosen = torch.rand(geometry.ids.shape, generator=torch.Generator().manual_seed(3)) < 0.4
    rows = RowSet.of(geometry, chosen & geometry.real)
    assert rows.valid.sum(1).tolist() == (chosen & geometry.real).sum(1).tolist()
    for window in (None, 4):
        for part, end in rows.blocks:
            seen = rows.visible(part, end, window).expand(3, 1, -1, -1)
            for b in range(3):
                for i, column in enumerate(rows.columns[b, part].tolist()):
                    if not rows.valid[b, part][i]:
                        assert column == geometry.nowhere
                        continue
                    assert column < end
                    for c in range(end):
                        distance = int(geometry.positions[b, column] - geometry.positions[b, c])
                        expected = c <= column and bool(geometry.real[b, c])
                        expected = expected and (window is None or distance < window)
                        assert bool(seen[b, 0, i, c]) == expected


def test_no_mask_is_larger_than_a_block_of_rows() -> None:
    geometry = Geometry.of([Context((), (helpers.tokens(700),))], [], CPU)
    rows = RowSet.of(geometry, geometry.in_units())
    sizes = [rows.visible(part, end, None).shape for part, end in rows.blocks]
    assert [tuple(size[2:]) for size in sizes] == [(64, 64 * i) for i in range(1, 11)] + [(60, 700)]


def test_a_row_set_can_only_shrink() -> None:
    with at_work(AgentKVShift(), "llama", CONTEXTS) as run:
        work = run.start(run.reusable)
        work.through(0)
        hidden = dict(zip(work.rows.columns[0].tolist(), work.hidden[0], strict=True))
        chosen = run.reusable & (run.geometry.ids % 3 == 0)
        work.keep(chosen)
        assert work.count == int(chosen.sum())
        for column, state in zip(work.rows.columns[0].tolist(), work.hidden[0], strict=True):
            assert column == run.geometry.nowhere or torch.equal(state, hidden[column])
        with pytest.raises(ValueError, match="not among"):
            work.keep(run.reusable)


@pytest.mark.parametrize("family", ["mistral", "gpt_oss"])
def test_layers_with_a_window_hold_what_later_queries_see(family: str) -> None:
    cache = Reposition().encode(helpers.model(family), CONTEXTS[0])
    windows = [layer.window for layer in cache.layers]
    assert 8 in windows
    for layer in cache.layers:
        rows = 7 if layer.window == 8 else len(CONTEXTS[0])
        assert (layer.rows, layer.get_seq_length()) == (rows, len(CONTEXTS[0]))
        assert layer.positions[0].tolist() == [*range(45 - rows, 45)]


def test_in_float64_everything_fresh_is_full_to_the_last_digits(
    llama64: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, rotary = CONTEXTS[0], llama64.model.rotary_emb
    monkeypatch.setattr(rotary, "inv_freq", rotary.frequencies, raising=False)
    method = AgentKVShift(recompute="1")
    cache = method.encode(llama64, context)
    with method.attach(llama64):
        found = QueryBatch(llama64, cache, QUERIES).logits
    expected = torch.stack([plain_logits(llama64, [*context.ids, *q])[-1] for q in QUERIES])
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=0)
