"""Probabilities that methods read are those that the model used, learned sinks included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import helpers
from kvexp import tiny
from kvexp.cache.evicting import EvictingLayer
from kvexp.methods.eviction import snapkv
from kvexp.methods.eviction.h2o import H2O
from kvexp.methods.eviction.kvzip import KVzip
from kvexp.methods.eviction.repetition import repeated
from kvexp.methods.eviction.snapkv import SnapKV
from kvexp.methods.eviction.view import View
from kvexp.tasks.batch import QueryBatch

PROMPTS = [helpers.tokens(n, seed=n) for n in (23, 14)]


@torch.no_grad()
def eager(ids: Any) -> list[torch.Tensor]:
    """Attention [Hq, T, T] of each layer, as transformers computes it, the sink's column left out."""
    model = tiny.build("gpt_oss")
    model.load_state_dict(helpers.model("gpt_oss").state_dict())
    model.set_attn_implementation("eager")
    return [x[0, :, :, : len(ids)] for x in model(torch.tensor([ids]), output_attentions=True).attentions]


def full(cache: Any) -> list[tuple[int, EvictingLayer]]:
    return [(i, layer) for i, layer in enumerate(cache.layers) if isinstance(layer, EvictingLayer)]


def test_sinks_take_a_real_share() -> None:
    """The test below would say nothing if they did not."""
    for attention in eager(PROMPTS[0]):
        assert bool((attention.sum(-1) < 0.97).any())


@torch.no_grad()
@pytest.mark.parametrize("chunks", [1, 3])
def test_attention_sums_are_the_models(chunks: int) -> None:
    """Summed over a prompt of a padded batch and over tokens behind it, in one forward or in several."""
    model, method = helpers.model("gpt_oss"), H2O()
    cache: Any = method.encode(model, [helpers.Context((), (p,)) for p in PROMPTS], None, 400)
    with method.attach(model):
        batch = QueryBatch(model, cache, [(5,), (9,)])
        if chunks > 1:
            batch.generate(chunks, lambda made: None)
    for b, prompt in enumerate(PROMPTS):
        attention = eager([*prompt, (5, 9)[b]])
        for index, layer in full(batch.cache):
            rows = layer.held()
            kept = rows.mask()[b]
            for head in range(kept.shape[0]):
                group = attention[index].shape[0] // kept.shape[0]
                expected = attention[index][head * group : (head + 1) * group].sum((0, 1))
                found = rows.tracks["received"][b, head][kept[head]]
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_window_probabilities_are_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last four queries of a prompt; SnapKV without pooling scores a row by their mean."""
    model, method = helpers.model("gpt_oss"), SnapKV(window=4, kernel=1)
    seen: dict[int, Any] = {}

    def score(self: SnapKV, view: View) -> torch.Tensor:
        scores = plain(self, view)
        seen[view.layer.index] = view.window_probabilities()[0], scores[0]
        return scores

    plain = snapkv.SnapKV.score
    monkeypatch.setattr(snapkv.SnapKV, "score", score)
    method.encode(model, PROMPTS[0], None, 9)
    attention = eager(PROMPTS[0])
    assert seen
    for index, (found, scores) in seen.items():
        torch.testing.assert_close(found, attention[index][:, -4:], atol=1e-5, rtol=1e-4)
        past = attention[index][:, -4:, :-4].mean(1)
        torch.testing.assert_close(scores[:, :-4], past, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_repetition_is_weighed_as_the_model_weighs() -> None:
    """KVzip whose repetition sees everything: the largest weight in a forward of context and repetition."""
    model, method = helpers.model("gpt_oss"), KVzip(repeat=(7, 8), sinks=23, chunk=64)
    context = helpers.Context((), (PROMPTS[0],))
    with method.attach(model):
        cache: Any = KVzip(repeat=(7, 8)).encode(model, context, None, None)
        scores = repeated(method, model, [context], cache)
    attention = eager([*PROMPTS[0], 7, 8, *PROMPTS[0]])
    for found, (index, _) in zip(scores, full(cache), strict=True):
        weights = attention[index][:, 23:, :23].amax(1).unflatten(0, (found.shape[1], -1)).amax(1)
        torch.testing.assert_close(found[0], weights, atol=1e-5, rtol=1e-4)
