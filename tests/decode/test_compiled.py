"""Compiled steps, traced as one graph and run without a compiler, against the steps of the modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kvexp
from helpers import tokens
from kvexp import tiny
from kvexp.attention.attach import attached
from kvexp.attention.options import Options, set_options
from kvexp.decode.compiled import ATTRIBUTE, CompiledSteps, compiled_steps
from kvexp.tasks.batch import QueryBatch

CONTEXT, QUERIES = tokens(40, seed=1), [tokens(3, seed=5), tokens(6, seed=7)]
CELLS = [("full", None), ("streaming_llm", 16), ("snapkv", 36), ("h2o", 20)]


def traced(family: str) -> tuple[Any, list[Any]]:
    """A model whose steps were traced with a backend that only counts graphs."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = tiny.build(family)
    with attached(model):
        setattr(model, ATTRIBUTE, CompiledSteps(model, backend))
    return model, graphs


@pytest.fixture(scope="module")
def llama() -> Iterator[tuple[Any, list[Any]]]:
    yield traced("llama")
    torch.compiler.reset()


def never(made: list[int]) -> None:
    """Nothing ends."""


def test_tokens_are_those_of_the_modules_in_one_graph(llama: tuple[Any, list[Any]]) -> None:
    model, graphs = llama
    for name, budget in CELLS:
        method = kvexp.method(name)
        cache = method.encode(model, CONTEXT, budget=budget)
        with method.attach(model):
            batch = QueryBatch(model, cache, QUERIES[:1])
            assert batch.generate(12, never, compiled=True) == batch.generate(12, never)
            assert batch.generate(12, never, compiled=True) == batch.generate(12, never)
    assert len(graphs) == 1


def test_padded_queries_keep_their_masks_and_positions(llama: tuple[Any, list[Any]]) -> None:
    model, graphs = llama
    method = kvexp.method("full")
    cache = method.encode(model, CONTEXT)
    with method.attach(model):
        batch = QueryBatch(model, cache, QUERIES)
        expected = batch.generate(12, never)
        set_options(model, Options(compiled=True))
        try:
            before = len(graphs)
            assert batch.generate(12, never) == expected
        finally:
            set_options(model, Options())
    assert len(graphs) <= before + 1  # another number of sequences


def test_windows_and_sinks_pass_through() -> None:
    model, graphs = traced("gpt_oss")
    method = kvexp.method("full")
    cache = method.encode(model, CONTEXT)
    with method.attach(model):
        batch = QueryBatch(model, cache, QUERIES[:1])
        assert batch.generate(8, never, compiled=True) == batch.generate(8, never)
    assert len(graphs) == 1


def test_steps_stay_as_they_are_where_they_cannot_be_compiled() -> None:
    latent = tiny.build("deepseek_v3")
    with attached(latent):
        assert compiled_steps(latent) is None
    model = tiny.build("llama")
    with attached(model, tap=True):
        assert compiled_steps(model) is None
    with pytest.raises(RuntimeError, match=r"use `with method\.attach"):
        compiled_steps(model)
