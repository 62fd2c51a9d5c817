"""Rotation by the model's own table, against the query that each layer of a real forward attends with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface

import helpers
from kvexp import tiny
from kvexp.attention import families
from kvexp.attention.attach import attention_modules
from kvexp.attention.rope import attention_scaling, rotate

LENGTH = 9
POSITIONS = torch.tensor([0, 1, 2, 5, 6, 40, 41, 300, 1000])
PRESETS = ("gpt-oss-20b", "glm-4.7-flash", "llama-3.1-8b-instruct", "qwen3-4b")


def models() -> list[Any]:
    """Every family, configurations that change the pairing, and real rotary tables (YaRN among them)."""
    cases = [pytest.param(lambda f=f: helpers.model(f), id=f) for f in families.FAMILIES]
    halves = {"rope_interleave": False}
    cases.append(pytest.param(lambda: tiny.build("deepseek_v3", changes=halves), id="deepseek_v3-halves"))
    cases += [pytest.param(lambda f=f"preset:{f}": helpers.model(f), id=f) for f in PRESETS]
    return cases


each_model = pytest.mark.parametrize("build", models())


def observed(model: Any, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each layer's query before and after its own rotation, [H, T, D]."""
    config = model.config
    family, before, after = families.of(config), [], []

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> Any:
        after.append(query[0])
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register("rope_probe", attention)
    hooks = [
        module.get_submodule(family.site(config)).register_forward_hook(
            lambda module, args, output: before.append(family.query_heads(output, config)[0])
        )
        for module in attention_modules(model)
    ]
    implementation = model.config._attn_implementation
    model.set_attn_implementation("rope_probe")
    model(torch.tensor([helpers.tokens(len(positions))]), position_ids=positions[None])
    model.set_attn_implementation(implementation)
    for hook in hooks:
        hook.remove()
    return list(zip(before, after, strict=True))


def in_place(query: torch.Tensor, model: Any) -> torch.Tensor:
    """Undo what MLA's own rotation does beside rotating: it sorts the even numbers before the odd ones."""
    config = model.config
    if families.of(config).query_pairing(config) != "adjacent_to_halves":
        return query
    still, turned = query.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
    return torch.cat([still, turned.unflatten(-1, (2, -1)).mT.flatten(-2)], dim=-1)


@each_model
def test_it_is_the_rotation_of_the_model_itself(build: Any) -> None:
    model = build()
    for index, (q_pre, query) in enumerate(observed(model, POSITIONS)):
        turned = rotate(model, q_pre[None], POSITIONS, index, scaled=True)[0]
        assert turned.shape == query.shape and turned.dtype == query.dtype
        torch.testing.assert_close(turned, in_place(query, model), atol=2e-5, rtol=1e-5)


@each_model
def test_scores_are_those_of_the_models_own_queries(build: Any) -> None:
    model = build()
    for index, (q_pre, query) in enumerate(observed(model, POSITIONS)):
        turned = rotate(model, q_pre[None], POSITIONS, index, scaled=True)[0]
        torch.testing.assert_close(turned @ turned.mT, query @ query.mT, atol=1e-4, rtol=1e-4)


@each_model
def test_norms_stay_and_only_distances_count(build: Any) -> None:
    model = build()
    config = model.config
    family = families.of(config)
    x = torch.randn(1, 2, LENGTH, family.query_dim(config), generator=torch.Generator().manual_seed(0))
    for index, rotates in enumerate(family.rotated(config)):
        turned = rotate(model, x, POSITIONS, index)
        if not rotates:
            assert turned is x
            continue
        assert not torch.allclose(turned, x, atol=1e-2)
        torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
        later = rotate(model, x, POSITIONS + 17, index)
        torch.testing.assert_close(later @ later.mT, turned @ turned.mT, atol=2e-3, rtol=1e-4)
        torch.testing.assert_close(rotate(model, turned, -POSITIONS, index), x, atol=2e-4, rtol=1e-4)
        assert torch.equal(rotate(model, x, POSITIONS * 0, index), x)


def test_layers_without_rotation_are_those_of_the_configuration() -> None:
    for family, still in (("smollm3", [1]), ("cohere2", [1]), ("llama", [])):
        model = helpers.model(family)
        x = torch.randn(1, 1, 1, families.of(model.config).query_dim(model.config))
        layers = range(model.config.num_hidden_layers)
        assert [i for i in layers if torch.equal(rotate(model, x, torch.tensor([5]), i), x)] == still


def test_yarn_scales_the_table_and_the_rotation_leaves_it_out() -> None:
    model, x = helpers.model("gpt_oss"), torch.ones(1, 1, 1, 16)
    assert attention_scaling(model, 0) == pytest.approx(1.3465736)
    pure, scaled = (rotate(model, x, torch.tensor([5]), 0, scaled=flag) for flag in (False, True))
    torch.testing.assert_close(scaled, 1.3465736 * pure)
    assert attention_scaling(helpers.model("llama"), 0) == 1.0
    assert attention_scaling(helpers.model("gemma3_text"), 0) == 1.0


def test_gemma_has_a_table_for_each_kind_of_layer() -> None:
    model, x = helpers.model("gemma3_text"), torch.ones(1, 1, 1, 16)
    sliding, full, other = (rotate(model, x, torch.tensor([5]), i) for i in range(3))
    assert torch.equal(sliding, other) and not torch.allclose(sliding, full, atol=1e-2)


def test_in_bfloat16_it_rounds_as_the_model_does() -> None:
    model = helpers.model("llama", torch.bfloat16)
    for index, (q_pre, query) in enumerate(observed(model, POSITIONS)):
        assert torch.equal(rotate(model, q_pre[None], POSITIONS, index)[0], query)
