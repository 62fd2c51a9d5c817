"""A context beyond what the model was made for: parts of it, each with a share of the traces."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

import helpers
from kvexp.errors import UserError
from kvexp.methods.memory import collect
from kvexp.methods.memory.asm import ASM
from kvexp.methods.memory.collect import _bounds, parts_needed
from kvexp.prompt import Context

TRACES = [helpers.tokens(n, seed=200 + n) for n in (4, 9, 6, 5, 7, 8, 3, 10)]


def made_for(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(helpers.model("llama").config, "max_position_embeddings", limit)


@pytest.mark.parametrize(
    ("limit", "longest", "parts"),
    [(60, 10, 1), (55, 10, 1), (54, 10, 2), (46, 9, 2), (44, 9, 2), (40, 9, 2), (36, 9, 2), (33, 9, 2)],
)
def test_as_few_parts_as_fit_with_room_for_queries(monkeypatch, limit, longest, parts):
    """45 tokens: a header of 3 and six chunks of 7, halves of 24, thirds of 17."""
    made_for(monkeypatch, limit)
    context = helpers.context()
    assert parts_needed(ASM(), helpers.model("llama"), context, longest) == parts
    assert parts_needed(ASM(chunks=3), helpers.model("llama"), context, longest) == 3


def test_what_cannot_be_parted_is_one_sentence(monkeypatch):
    made_for(monkeypatch, 12)
    with pytest.raises(UserError, match="context of 45 tokens exceeds the 12 that this model was made for"):
        parts_needed(ASM(), helpers.model("llama"), helpers.context(), 4)


@pytest.mark.parametrize(
    ("lengths", "count", "bounds"),
    [
        ([7] * 6, 2, [0, 3, 6]),
        ([7] * 6, 3, [0, 2, 4, 6]),
        ([40, 1, 1, 1], 2, [0, 1, 4]),
        ([1, 1, 1, 40], 3, [0, 2, 3, 4]),
    ],
)
def test_parts_hold_about_as_many_tokens(lengths, count, bounds):
    assert _bounds(lengths, count) == bounds


def test_each_trace_runs_over_one_part_whatever_the_batches(prepared, monkeypatch, caplog):
    made_for(monkeypatch, 40)
    seen: list[tuple[int, tuple[int, ...]]] = []
    forward = collect.forward

    def watched(model, cache, traces):
        seen.extend((id(cache.layers[0].sources[0]), tuple(trace)) for trace in traces)
        forward(model, cache, traces)

    monkeypatch.setattr(collect, "forward", watched)
    with caplog.at_level(logging.WARNING):
        made = prepared(TRACES, 8, layout="pooled")
    assert "its memory is built in 2 parts of at most 24 tokens" in caplog.text
    assert sorted(trace for _, trace in seen) == sorted(TRACES)  # each once
    manifest = made.memory.manifest
    assert manifest["parts"] == 2 and manifest["trace_tokens"] == sum(map(len, TRACES))
    assert made.cache().seen == 24  # where queries stand
    assert torch.isfinite(made.logits(helpers.QUERIES)).all()
    places = {
        trace: collect.Collector._place(dataclasses.make_dataclass("C", ["caches"])([0, 1]), trace)
        for trace in TRACES
    }
    assert set(places.values()) == {0, 1}


def test_a_memory_in_parts_is_the_pooled_memory_of_its_parts(prepared, monkeypatch):
    """Each trace's samples are those of a run over its own part alone."""
    made_for(monkeypatch, 40)
    made = prepared(TRACES, None, layout="pooled")
    made_for(monkeypatch, 4096)
    context = made.context
    halves = [Context(context.header, context.chunks[:3]), Context(context.header, context.chunks[3:])]
    place = dataclasses.make_dataclass("C", ["caches"])([0, 1])
    mine = [[t for t in TRACES if collect.Collector._place(place, t) == i] for i in (0, 1)]
    alone = [prepared(mine[i], None, context=halves[i], layout="pooled") for i in (0, 1)]
    for layer in made.memory.layers:
        whole = torch.cat([b["s"].flatten() for b in made.samples.blocks(layer, 512)]).sort().values
        parts = (
            torch.cat([b["s"].flatten() for one in alone for b in one.samples.blocks(layer, 512)])
            .sort()
            .values
        )
        torch.testing.assert_close(whole, parts, rtol=0, atol=1e-4)
