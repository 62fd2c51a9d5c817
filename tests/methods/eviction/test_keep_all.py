from __future__ import annotations

from typing import Any

import pytest
import torch

import helpers
from kvexp import instantiate
from kvexp.cache.evicting import EvictingLayer
from kvexp.errors import UserError
from kvexp.methods.baseline.full import Full
from kvexp.methods.eviction.keep_all import KeepAll
from kvexp.tasks.batch import QueryBatch

TARGET = {"_target_": "kvexp.methods.eviction.keep_all.KeepAll"}


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_answers_as_full_does_and_drops_nothing(family: str) -> None:
    model = helpers.model(family)
    answers: list[tuple[torch.Tensor, Any]] = []
    for method in (Full(), KeepAll()):
        cache = method.encode(model, helpers.context(), budget=17)
        with method.attach(model):
            batch = QueryBatch(model, cache, helpers.QUERIES)
            answers.append((batch.logits, batch.generate(12, lambda made: None)))
    assert answers[0][1] == answers[1][1]
    torch.testing.assert_close(answers[0][0], answers[1][0], atol=1e-4, rtol=0)
    assert any(isinstance(layer, EvictingLayer) for layer in cache.layers)
    assert set(cache.entries()) == {45} and "evicted" not in cache.counters


def test_it_has_no_knobs_and_no_budget() -> None:
    assert instantiate.build("method", "keep_all", TARGET) == KeepAll()
    with pytest.raises(UserError, match=r"there is no 'method.sinks'. Method keep_all has no knobs"):
        instantiate.build("method", "keep_all", {**TARGET, "sinks": 4})
    assert KeepAll.uses_budget is False and KeepAll.expects == ()
