"""Lookups end to end: two levels against flat, int8 entries, counters, pads, BOS."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import helpers
from kvexp import tiny
from kvexp.budget import Budget
from kvexp.errors import UserError
from kvexp.model import LoadedModel
from kvexp.prompt import bos_ids
from kvexp.tasks.batch import QueryBatch
from kvexp.tasks.session import Session
from kvexp_kernels.lookup import InvertedLists
from kvexp_kernels.lookup_attend import NativeStep
from kvexp_kernels.lookup_attend.native import SOURCE
from kvexp_kernels.native import library

TRACES = [helpers.tokens(12, seed=s) for s in range(12)]
QUERIES = [helpers.tokens(n, seed=70 + n) for n in (6, 3, 9)]


@pytest.mark.parametrize("layout", ["pooled", "shared"])
def test_two_levels_with_every_cell_probed_are_flat_lookup(prepared, layout):
    made = prepared(TRACES, 40, layout=layout)
    flat = made.cache()
    method = replace(made.method, lookup="two_level", cells=5, probe=5, recall=True)
    two = made.cache(method)
    torch.testing.assert_close(made.logits(QUERIES, two), made.logits(QUERIES, flat), rtol=0, atol=1e-5)
    layers, books = 3, 2 if layout == "pooled" else 1
    columns = sum(map(len, QUERIES))  # of a padded batch only the real tokens are looked up
    searches = layers * books * columns * (3 if layout == "pooled" else 1)
    counted = two.counters
    assert counted["looked_up"] == layers * sum(map(len, QUERIES)) == flat.counters["looked_up"]
    assert counted["keys_held"] == searches * 40
    assert counted["keys_scored"] == searches * (40 + 5)
    assert counted["agreed_with_flat"] == counted["compared_with_flat"] == searches


def test_fewer_cells_score_fewer_keys(prepared):
    made = prepared(TRACES, 64, layout="pooled")
    method = replace(made.method, lookup="two_level", cells=16, probe=4, recall=True)
    two = made.cache(method)
    made.logits(QUERIES, two)
    counted = two.counters
    assert counted["keys_scored"] < 0.7 * counted["keys_held"]
    assert 0.7 * counted["compared_with_flat"] < counted["agreed_with_flat"] < counted["compared_with_flat"]
    plain = made.cache(replace(method, recall=False))
    made.logits(QUERIES, plain)
    assert "agreed_with_flat" not in plain.counters
    # The copy of the keys that lies in cells is counted: centres, keys and entry numbers of each codebook.
    assert two.nbytes() == made.cache().nbytes() + 3 * 2 * (16 * 16 * 4 + 64 * 16 * 4 + 64 * 8)


@pytest.mark.parametrize(("layout", "entries"), [("pooled", "model"), ("shared", "int8")])
def test_ivf_finds_what_two_levels_find(prepared, layout, entries):
    pytest.importorskip("faiss")
    made = prepared(TRACES, 64, layout=layout, entries=entries)
    method = replace(made.method, lookup="two_level", cells=16, probe=4, recall=True)
    two, ivf = made.cache(method), made.cache(replace(method, lookup="ivf"))
    torch.testing.assert_close(made.logits(QUERIES, ivf), made.logits(QUERIES, two), rtol=0, atol=1e-5)
    assert ivf.counters == two.counters
    books, width = (2, 16) if layout == "pooled" else (1, 6 * 16)
    wide = 64 * width * 4 if entries == "int8" else 0  # keys that were rounded are compared as float32
    cells = sum(len(index.centres) for layer in two.layers for index in layer.sources[0].lookup.index)
    expected = 3 * books * (64 * (2 * width + 8) + wide) + cells * width * 4
    assert ivf.nbytes() == made.cache().nbytes() + expected


def test_ivf_needs_faiss(prepared, monkeypatch):
    made = prepared(TRACES, 20, layout="pooled")
    monkeypatch.setattr(InvertedLists, "suits", staticmethod(lambda keys: False))
    with pytest.raises(UserError, match=r"use method\.lookup=two_level"):
        made.cache(replace(made.method, lookup="ivf"))


def test_the_default_number_of_cells(prepared):
    made = prepared(TRACES, 40, layout="pooled", lookup="two_level")
    index = made.lookup(0).index
    assert index is not None and all(len(part.centres) <= 40 and len(part.keys) == 40 for part in index)


@pytest.mark.parametrize(("dtype", "layout"), [(torch.float32, "pooled"), (torch.bfloat16, "group")])
def test_bytes_of_entries(prepared, dtype, layout):
    """Per layer and KV head: K entries of m D keys, m Dv outputs, m float32 log Z; int8 adds 1 + m scales."""
    size, heads, layers, k, d = dtype.itemsize, 1 if layout == "pooled" else 3, 3, 20, 16
    model = helpers.model("llama", dtype)
    made = prepared(TRACES, k, model=model, layout=layout)
    assert (
        made.memory.nbytes() == layers * 2 * k * (2 * heads * d * size + 4 * heads) == made.cache().nbytes()
    )
    small = prepared(TRACES, k, model=model, layout=layout, entries="int8")
    assert small.memory.nbytes() == layers * 2 * k * (2 * heads * d + 4 * (1 + heads) + 4 * heads)
    assert small.cache().entries() == [k] * layers


def test_int8_entries_are_near(prepared):
    made, small = (
        prepared(TRACES, 48, layout="pooled", entries=entries, aggregate="mean")
        for entries in ("model", "int8")
    )
    for one, two in zip(made.layers(), small.layers(), strict=True):
        torch.testing.assert_close(two.keys * two.key_scale[..., None], one.keys, rtol=0, atol=1 / 250)
        torch.testing.assert_close(
            two.a * two.a_scale[..., None], one.a, rtol=0, atol=float(one.a.abs().max()) / 250
        )
        assert torch.equal(one.log_z, two.log_z)
    exact, rounded = made.errors(TRACES).relative_errors(), small.errors(TRACES).relative_errors()
    assert all(b < 1.03 * a for a, b in zip(exact, rounded, strict=True))


def test_a_pad_is_not_looked_up_for_anyone(prepared):
    """Queries of a padded batch count and answer as they do alone."""
    made = prepared(TRACES, 30)
    cache = made.cache()
    together = made.logits(QUERIES, cache)
    assert cache.counters["looked_up"] == 3 * sum(map(len, QUERIES))
    for row, query in enumerate(QUERIES):
        torch.testing.assert_close(together[row], made.logits([query])[0], rtol=0, atol=1e-4)


def test_bos_in_query(prepared):
    made = prepared(TRACES, 30)
    tokenizer = tiny.tokenizer()
    loaded = LoadedModel(made.model, tokenizer, "tiny", "", None, torch.float32, torch.device("cpu"))
    with made.method.attach(made.model):
        for flag, lead in ((False, ()), (True, bos_ids(tokenizer))):
            method = replace(made.method, bos_in_query=flag)
            session = Session(loaded, method, made.memory, Budget(30))
            expected = QueryBatch(made.model, made.cache(), [[*lead, *query] for query in QUERIES]).logits
            torch.testing.assert_close(session.run(made.context, QUERIES).logits, expected, rtol=0, atol=0)
    assert len(bos_ids(tokenizer)) == 1


@pytest.mark.parametrize("lookup", ["flat", "two_level", "ivf"])
@pytest.mark.parametrize(
    "knobs",
    [
        {"layout": "pooled"},
        {"layout": "shared", "entries": "int8"},
        {"layout": "group", "whiten": "full"},
        {"layout": "pooled", "residual": True, "slope": True},
    ],
    ids=lambda knobs: "-".join(map(str, knobs.values())),
)
def test_steps_of_decoding_are_the_same_without_the_twin_in_cpp(prepared, monkeypatch, lookup, knobs):
    if lookup == "ivf":
        pytest.importorskip("faiss")
    made = prepared(TRACES, 64, **knobs)
    method = replace(made.method, lookup=lookup, cells=16, probe=4)
    steps: list[int] = []

    def logits(cache) -> torch.Tensor:
        with made.method.attach(made.model), torch.no_grad():
            ids = torch.tensor([[5, 9, 11, 4], [7, 7, 2, 30]])
            return torch.cat([made.model(x, cache=cache).logits for x in ids.split([2, 1, 1], dim=1)], dim=1)

    step = NativeStep.lookup_attend
    monkeypatch.setattr(NativeStep, "lookup_attend", lambda *given: steps.append(1) or step(*given))
    ours = made.cache(method)
    found = logits(ours)
    monkeypatch.setattr("kvexp.methods.memory.lookup.native_step", lambda *given: None)
    plain = made.cache(method)
    torch.testing.assert_close(found, logits(plain), rtol=0, atol=1e-4)
    scored = ours.counters.pop("keys_scored", 0), plain.counters.pop("keys_scored", 0)
    assert ours.counters == plain.counters
    assert scored[0] <= scored[1], "cells that cannot hold the best key are not searched"
    fused = "residual" not in knobs and not (lookup == "flat" and "entries" in knobs)
    assert len(steps) == (2 * 3 if fused and library(SOURCE) else 0)
