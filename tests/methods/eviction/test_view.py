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
from kvexp.methods.eviction.raas import RaaS
from kvexp.methods.eviction.repetition import repeated
from kvexp.methods.eviction.snapkv import SnapKV
from kvexp.methods.eviction.view import View
from kvexp.tasks.batch import QueryBatch

PROMPTS = [helpers.tokens(n, seed=n) for n in (23, 14)]


@torch.no_grad()
def eager(ids: Any, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Attention [Hq, T, T] of each layer, as transformers computes it, the sink's column left out."""
    model = tiny.build("gpt_oss").to(dtype)
    model.load_state_dict(helpers.model("gpt_oss", dtype).state_dict())
    model.set_experts_implementation("eager")
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


def captured(
    monkeypatch: pytest.MonkeyPatch, method: SnapKV, dtype: torch.dtype = torch.float32
) -> dict[int, torch.Tensor]:
    """What `method` scores in each layer at the end of a prompt: [Hq or H, S], rows before its window."""
    seen: dict[int, torch.Tensor] = {}

    def score(self: SnapKV, view: View) -> torch.Tensor:
        scores = plain(self, view)
        seen[view.layer.index] = scores[0, :, : -method.window]
        return scores

    plain = snapkv.SnapKV.score
    monkeypatch.setattr(snapkv.SnapKV, "score", score)
    method.encode(helpers.model("gpt_oss", dtype), PROMPTS[0], None, 9)
    assert seen
    return seen


@torch.no_grad()
@pytest.mark.parametrize("merge", ["scores", "attention"])
def test_over_the_past_alone_sinks_cancel(merge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own weights of the rows before the window, each query's divided by their sum."""
    method = SnapKV(window=4, kernel=1, softmax="past", merge=merge)
    attention = eager(PROMPTS[0])
    for index, found in captured(monkeypatch, method).items():
        past = attention[index][:, -4:, :-4]
        expected = (past / past.sum(-1, keepdim=True)).mean(1)
        if merge == "attention":
            expected = expected.unflatten(0, (found.shape[0], -1)).mean(1)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("group", ["mean", "max"])
def test_logits_of_a_group_meet_the_sink_of_the_group(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are read off the model's weights: a row's over the sink's is their difference."""
    method = SnapKV(window=4, kernel=1, merge="logits", group=group)
    attention, model = eager(PROMPTS[0], torch.float64), helpers.model("gpt_oss", torch.float64)
    for index, found in captured(monkeypatch, method, torch.float64).items():
        weights = attention[index][:, -4:]
        own = model.model.layers[index].self_attn.sinks[:, None, None]
        left = (1 - weights.sum(-1, keepdim=True)).log()  # what the sink takes
        logits = torch.cat([own + weights.log() - left, own.expand(-1, 4, 1)], dim=-1)
        grouped = logits.unflatten(0, (found.shape[0], -1))
        grouped = grouped.mean(1) if group == "mean" else grouped.amax(1)
        expected = grouped.softmax(-1)[..., :-5].mean(1)
        torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("estimate", ["exact", "page"])
def test_pages_of_one_row_are_weighed_as_the_model_weighs(
    estimate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a page of one row the bounds are its logit: both estimates are the latest token's attention."""
    model, method = helpers.model("gpt_oss"), RaaS(page=1, estimate=estimate)
    seen: list[tuple[int, torch.Tensor]] = []

    def attention(self: RaaS, view: View, pages: Any) -> torch.Tensor:
        found = plain(self, view, pages)
        seen.append((view.layer.index, found[0]))
        return found

    plain = RaaS._attention
    cache = method.encode(model, PROMPTS[0], None, 400)
    with method.attach(model):
        batch = QueryBatch(model, cache, [(5,)])
        monkeypatch.setattr(RaaS, "_attention", attention)
        [made], _ = batch.generate(4, lambda ids: None)
    weights = eager([*PROMPTS[0], 5, *made[:3]])
    assert len(seen) % 3 == 0 and len(seen) >= 3
    for number, (index, found) in enumerate(seen):
        rows = len(PROMPTS[0]) + 2 + number // (len(seen) // 3)  # of this step
        latest = weights[index][:, rows - 1, :rows]
        expected = latest.unflatten(0, (found.shape[0], -1)).amax(1)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
