"""Which tokens are chosen, against sorting and against a question run over a slow model."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import helpers
from kvexp.methods.base import Method
from kvexp.methods.reuse.encode import begun
from kvexp.methods.reuse.forward import Run
from kvexp.methods.reuse.geometry import Geometry
from kvexp.methods.reuse.probes import drawn, first_of_units, relevance, top_of_contexts, top_of_units
from kvexp.methods.reuse.reposition import Reposition
from kvexp.methods.reuse.units import Encoder
from kvexp.prompt import Context
from reuse_reference import Reference

IDS = helpers.tokens(40, seed=5)
CONTEXTS = [
    Context(IDS[:3], (IDS[3:14], IDS[14:20], IDS[20:29])),
    Context(IDS[:2], (IDS[5:9], (), IDS[9:10])),
    Context((), (IDS[10:17],)),
]
GEOMETRY = Geometry.of(CONTEXTS, [], torch.device("cpu"))


def by_hand(scores: torch.Tensor, columns: list[int], row: int, count: int) -> set[tuple[int, int]]:
    order = sorted(columns, key=lambda c: (-float(scores[row, c]), c))
    return {(row, c) for c in order[:count]}


def pairs(chosen: torch.Tensor) -> set[tuple[int, int]]:
    return {(int(b), int(c)) for b, c in chosen.nonzero()}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("first", [0, 2])
def test_the_best_of_each_unit_ties_to_the_lower_column(seed: int, first: int) -> None:
    numbers = random.Random(seed)
    scores = torch.tensor([[float(numbers.randrange(4)) for _ in range(30)] for _ in CONTEXTS])
    counts = [numbers.randrange(unit.length + 1) for unit in GEOMETRY.units]
    expected: set[tuple[int, int]] = set()
    for unit, count in zip(GEOMETRY.units, counts, strict=True):
        columns = list(range(unit.start + first, unit.start + unit.length))
        expected |= by_hand(scores, columns, unit.sequence, count)
    assert pairs(top_of_units(GEOMETRY, scores, counts, first)) == expected


@pytest.mark.parametrize("seed", range(4))
def test_the_best_of_a_context_compete_over_its_units(seed: int) -> None:
    numbers = random.Random(seed)
    scores = torch.tensor([[float(numbers.randrange(5)) for _ in range(30)] for _ in CONTEXTS])
    counts = [numbers.randrange(unit.length + 1) for unit in GEOMETRY.units]
    among = (
        torch.tensor([[numbers.random() < 0.7 for _ in range(30)] for _ in CONTEXTS]) & GEOMETRY.in_units()
    )
    for limit in (None, among):
        expected: set[tuple[int, int]] = set()
        for b in range(3):
            mine = [unit for unit in GEOMETRY.units if unit.sequence == b]
            columns = [
                c for u in mine for c in range(u.start, u.start + u.length) if limit is None or limit[b, c]
            ]
            expected |= by_hand(scores, columns, b, sum(counts[u.number] for u in mine))
        assert pairs(top_of_contexts(GEOMETRY, scores, counts, limit)) == expected


def test_columns_of_a_batch() -> None:
    """Contexts end in one column; positions, units and real tokens by hand."""
    assert (GEOMETRY.width, GEOMETRY.nowhere, GEOMETRY.batch, GEOMETRY.padded) == (29, 29, 3, True)
    assert [(u.sequence, u.at, u.start, u.length) for u in GEOMETRY.units] == [
        (0, 0, 3, 11), (0, 1, 14, 6), (0, 2, 20, 9), (1, 0, 24, 4), (1, 2, 28, 1), (2, 0, 22, 7),
    ]  # fmt: skip
    assert GEOMETRY.positions[1, 22:29].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert GEOMETRY.units_of[1, 20:].tolist() == [-2, -2, -1, -1, 3, 3, 3, 3, 4, -2]
    assert GEOMETRY.real.sum(1).tolist() == [29, 7, 7]
    assert GEOMETRY.ids[2, 22:29].tolist() == list(IDS[10:17])
    asked = Geometry.of(CONTEXTS, [(1, 2), (3,), (4, 5, 6)], torch.device("cpu"))
    assert (asked.width, asked.nowhere) == (29, 32)
    assert asked.ids[:, 29:].tolist() == [[1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 6, 0]]
    assert asked.positions[2, 29:32].tolist() == [7, 8, 9]
    assert asked.in_query().sum(1).tolist() == [2, 1, 3]
    assert torch.equal(asked.in_units()[:, :30], GEOMETRY.in_units())


def test_the_first_tokens_of_units() -> None:
    expected = {
        (0, 3),
        (0, 4),
        (0, 14),
        (0, 15),
        (0, 20),
        (0, 21),
        (1, 24),
        (1, 25),
        (1, 28),
        (2, 22),
        (2, 23),
    }
    assert pairs(first_of_units(GEOMETRY, 2)) == expected
    assert not first_of_units(GEOMETRY, 0).any()


def test_drawn_scores_do_not_depend_on_the_batch() -> None:
    together = drawn(GEOMETRY, "0 keys")
    alone = Geometry.of(CONTEXTS[2:], [], torch.device("cpu"))
    assert torch.equal(drawn(alone, "0 keys")[0, :7], together[2, 22:29])
    assert not torch.equal(drawn(GEOMETRY, "1 keys"), together)
    assert ((together > 0) <= GEOMETRY.in_units()).all() and together.max() < 1


def placed(family: str, contexts: list[Context], queries: list[tuple[int, ...]]) -> tuple[Method, Run]:
    method, model = Reposition(), helpers.model(family)
    with method.attach(model), torch.no_grad():
        encoder = Encoder(model, method.opened(model))
        return method, begun(method, encoder, Geometry.of(contexts, queries, torch.device("cpu")))


def read(family: str, contexts: list[Context], queries: list[tuple[int, ...]]) -> tuple[torch.Tensor, Run]:
    method, run = placed(family, contexts, queries)
    with method.attach(run.model), torch.no_grad():
        return relevance(run), run


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_relevance_is_that_of_a_slow_question(family: str) -> None:
    query = helpers.tokens(5, seed=3)
    found, _ = read(family, CONTEXTS[:1], [query])
    with torch.no_grad():
        expected = torch.tensor(Reference(family, CONTEXTS[0]).relevance(query))
    torch.testing.assert_close(found[0, :29], expected, atol=1e-6, rtol=1e-4)
    assert found[0, :29].sum() == pytest.approx(1.0, abs=1e-5)
    assert found[0, 29:].abs().max() == 0


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3", "gemma3_text", "mistral"])
def test_relevance_in_a_batch_is_that_of_each_alone(family: str) -> None:
    queries: list[Any] = [helpers.tokens(n, seed=n) for n in (5, 2, 9)]
    together, run = read(family, CONTEXTS, queries)
    assert run.report.question_rows == 16 * run.layers
    for b, (context, query) in enumerate(zip(CONTEXTS, queries, strict=True)):
        alone, _ = read(family, [context], [query])
        n = len(context)
        torch.testing.assert_close(together[b, 29 - n : 29], alone[0, :n], atol=1e-6, rtol=1e-3)


def test_long_questions_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvexp.attention.options import Options, set_options
    from kvexp.methods.reuse import probes

    query = helpers.tokens(11, seed=3)
    whole, _ = read("llama", CONTEXTS[:1], [query])
    monkeypatch.setattr(probes, "RELEVANCE_ROWS", 3)
    set_options(helpers.model("llama"), Options(prefill_chunk=4))
    try:
        parts, _ = read("llama", CONTEXTS[:1], [query])
    finally:
        set_options(helpers.model("llama"), Options())
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-4)
