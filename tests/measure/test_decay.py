"""KL and attention mass by position, against plain forwards and the model's own attention weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import helpers
from helpers import QUERIES, Calibration, plain_logits
from kvexp import tiny
from kvexp.attention.families import layer_windows
from kvexp.budget import Budget
from kvexp.measure.decay import MassMeter, prefix_decay
from kvexp.methods.baseline.full import Full
from kvexp.methods.baseline.truncate import Truncate
from kvexp.methods.memory.asm import ASM
from kvexp.tasks.batch import QueryBatch

CONTEXT, TOKENS = helpers.context(), 5


def state(*masses: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A state of one head and one position for each batch row; only its log-sum-exp matters."""
    return torch.zeros(len(masses), 1, 1, 4), torch.tensor(masses).log().view(-1, 1, 1)


def test_the_share_of_the_first_source() -> None:
    meter, nobody = MassMeter(), (None, None)
    meter(*nobody, [state(3.0, 1.0), state(2.0, 1.0)], state(1.0, 2.0))  # type: ignore[arg-type]
    assert meter.mean().tolist() == pytest.approx([(3 / 6 + 1 / 4) / 2])
    meter(*nobody, [state(1.0)], state(1.0))  # type: ignore[arg-type]
    assert meter.mean().tolist() == pytest.approx([(3 / 6 + 1 / 4 + 1 / 2) / 3])


def made(model: Any, queries: Sequence[Sequence[int]]) -> list[list[int]]:
    """Greedy continuations under plain attention to the whole context."""
    continuations = []
    for query in queries:
        ids = [*CONTEXT.ids, *query]
        for _ in range(TOKENS):
            ids.append(int(plain_logits(model, ids)[-1].argmax()))
        continuations.append(ids[-TOKENS:])
    return continuations


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_mass_is_what_the_model_s_attention_weights_give_the_prefix(family: str) -> None:
    model = tiny.build(family)
    whole = [i for i, window in enumerate(layer_windows(model.config)) if window is None]
    expected = torch.zeros(TOKENS)
    for query, tokens in zip(QUERIES, made(model, QUERIES), strict=True):
        ids = torch.tensor([[*CONTEXT.ids, *query, *tokens]])
        with torch.no_grad():
            weights = model(ids, output_attentions=True).attentions
        for i in whole:
            to_prefix = weights[i][0, :, -TOKENS:, : len(CONTEXT)].sum(-1)  # [heads, tokens]
            expected += to_prefix.mean(0) / len(whole) / len(QUERIES)
    found = decay(model, Full())
    assert found["mass_full"] == pytest.approx(expected.tolist(), abs=1e-4)
    assert found["mass_method"] == found["mass_full"]
    assert found["kl"] == [0.0] * TOKENS and found["top1_agreement"] == [1.0] * TOKENS


def decay(model: Any, method: Any, memory: Any = None, parts: Sequence[Any] = (QUERIES,)) -> dict[str, Any]:
    budget = Budget(20)
    with method.attach(model, memory):
        full, ours = Full().encode(model, CONTEXT), method.encode(model, CONTEXT, memory, budget)
        batches = ((QueryBatch(model, full, part), QueryBatch(model, ours, part)) for part in parts)
        return prefix_decay(batches, TOKENS)


def test_kl_is_teacher_forced_on_what_full_attention_generates() -> None:
    model, method = tiny.build("llama"), Truncate()
    kept = list(method.select(CONTEXT, Budget(20)))
    kl, agreement = torch.zeros(TOKENS), torch.zeros(TOKENS)
    for query, tokens in zip(QUERIES, made(model, QUERIES), strict=True):
        p, q = (
            plain_logits(model, [*before, *query, *tokens])[-TOKENS:].log_softmax(-1)
            for before in (CONTEXT.ids, kept)
        )
        kl += (p.exp() * (p - q)).sum(-1) / len(QUERIES)
        agreement += (p.argmax(-1) == q.argmax(-1)) / len(QUERIES)
    found = decay(model, method)
    assert found["kl"] == pytest.approx(kl.tolist(), abs=1e-4)
    assert found["top1_agreement"] == pytest.approx(agreement.tolist(), abs=1e-4)
    assert found["queries"] == 3 and min(found["kl"]) > 0.01


def test_figures_are_means_over_queries_however_they_are_batched(tmp_path: Path) -> None:
    model, method = tiny.build("llama"), ASM(aggregate="mean")
    traces = [helpers.tokens(9, seed) for seed in range(12)]
    memory = method.prepare(model, Calibration(CONTEXT, traces, tmp_path), Budget(20))
    at_once = decay(model, method, memory)
    in_parts = decay(model, method, memory, [QUERIES[:2], QUERIES[2:]])
    for name, figures in at_once.items():
        assert in_parts[name] == pytest.approx(figures, abs=2e-4), name
    assert all(0 < share < 1 for share in at_once["mass_method"])
    assert not math.isclose(sum(at_once["kl"]), 0, abs_tol=1e-3)
