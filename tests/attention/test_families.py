"""The table of model families, checked against the models themselves."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface

from kvexp import tiny
from kvexp.attention import families
from kvexp.errors import UserError

LENGTH = 13


def observe(model):
    """Run the model; return each layer's tapped output, rotary table, attended query and sliding window."""
    family = families.of(model.config)
    taps, tables, queries, windows = [], [], [], []

    def attention(module, query, key, value, mask, **kwargs):
        queries.append(query)
        windows.append(kwargs.get("sliding_window"))
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register("observed", attention)
    hooks = []
    for layer in model.model.layers:
        site = getattr(layer.self_attn, family.site(model.config))
        hooks.append(site.register_forward_hook(lambda module, args, output: taps.append(output)))
        hooks.append(
            layer.self_attn.register_forward_pre_hook(
                lambda module, args, kwargs: tables.append(kwargs["position_embeddings"]), with_kwargs=True
            )
        )
    before = model.config._attn_implementation
    model.set_attn_implementation("observed")
    model(torch.arange(2 * LENGTH).view(2, LENGTH))
    model.set_attn_implementation(before)
    for hook in hooks:
        hook.remove()
    return taps, tables, queries, windows


def own_rotation(model, query, cos, sin):
    """Rotate with the function of the model's own module."""
    family, config = families.of(model.config), model.config
    code = sys.modules[type(model.model.layers[0].self_attn).__module__]
    if not family.latent:
        return code.apply_rotary_pos_emb(query, query, cos, sin)[0]
    rotate = code.apply_rotary_pos_emb_interleave if config.rope_interleave else code.apply_rotary_pos_emb
    still, turning = query.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
    return torch.cat([still, rotate(turning, turning, cos, sin)[0]], dim=-1)


def table_rotation(family, config, query, cos, sin):
    """Rotate as the table says: complex multiplication of the numbers that it pairs."""
    layouts = {"tiled": slice(0, cos.shape[-1] // 2), "repeated": slice(0, None, 2), "single": slice(None)}
    cos, sin = cos[..., layouts[family.table]], sin[..., layouts[family.table]]
    size = 2 * cos.shape[-1]
    first = query.shape[-1] - size if family.latent else 0
    turning = query[..., first : first + size]
    adjacent = family.query_pairing(config) != "halves"
    pairs = turning.unflatten(-1, (size // 2, 2)) if adjacent else turning.unflatten(-1, (2, size // 2)).mT
    turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin).unsqueeze(1)
    pairs = torch.view_as_real(turned)
    turned = pairs.flatten(-2) if family.query_pairing(config) == "adjacent" else pairs.mT.flatten(-2)
    return torch.cat([query[..., :first], turned, query[..., first + size :]], dim=-1)


def variants():
    """Every family, and the configurations that move its tap."""
    for name in families.FAMILIES:
        yield pytest.param(name, {}, id=name)
    yield pytest.param("deepseek_v3", {"q_lora_rank": None}, id="deepseek_v3-no-query-rank")
    yield pytest.param("deepseek_v3", {"rope_interleave": False}, id="deepseek_v3-halves")
    yield pytest.param("glm4_moe", {"use_qk_norm": False}, id="glm4_moe-no-norm")
    for name in ("qwen3", "gemma3_text"):
        heads = {"num_attention_heads": LENGTH, "num_key_value_heads": LENGTH, "hidden_size": 4 * LENGTH}
        yield pytest.param(name, heads, id=f"{name}-as-many-heads-as-tokens")


@pytest.mark.parametrize("name, changes", list(variants()))
def test_tapped_query_rotates_into_the_attended_one(name, changes):
    model = tiny.build(name, changes=changes)
    family, config = families.of(model.config), model.config
    taps, tables, queries, _ = observe(model)
    assert len(taps) == len(queries) == config.num_hidden_layers
    for tap, (cos, sin), query, rotates in zip(taps, tables, queries, family.rotated(config), strict=True):
        q_pre = family.query_heads(tap, config)
        assert q_pre.shape == query.shape == (2, config.num_attention_heads, LENGTH, family.query_dim(config))
        if not rotates:
            assert torch.equal(q_pre, query)
            continue
        assert not torch.allclose(q_pre, query, atol=1e-2)
        assert torch.equal(own_rotation(model, q_pre, cos, sin), query)
        by_table = table_rotation(family, config, q_pre, cos, sin)
        torch.testing.assert_close(by_table, query, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_facts_of_the_table_agree_with_the_model(name):
    model = tiny.build(name)
    family, config = families.of(model.config), model.config
    _, tables, _, windows = observe(model)
    assert families.layer_windows(config) == tuple(windows)
    turning = tables[0][0].shape[-1] * (2 if family.table == "single" else 1)
    assert family.partial == (turning < family.query_dim(config))
    assert family.latent == hasattr(model.model.layers[0].self_attn, "expand_kv")
    assert family.typed_rotary == hasattr(model.model.rotary_emb, "layer_types")


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_row_sees_exactly_its_window(name):
    model = tiny.build(name)
    ids = torch.arange(2 * LENGTH).view(2, LENGTH)
    weights = model(ids, output_attentions=True).attentions
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    for window, weight in zip(families.layer_windows(model.config), weights, strict=True):
        seen = (distance >= 0) & (distance < (window or LENGTH))
        assert torch.equal(weight.gt(0), seen.expand_as(weight))


def test_windows_of_every_kind():
    def windows(kind, **entries):
        return families.layer_windows(SimpleNamespace(model_type=kind, num_hidden_layers=2, **entries))

    mixed = ["sliding_attention", "full_attention"]
    assert windows("llama", sliding_window=4) == (None, None)
    assert windows("mistral", sliding_window=4) == (4, 4)
    assert windows("mistral", sliding_window=None) == (None, None)
    assert windows("qwen2", sliding_window=4, layer_types=mixed) == (4, None)
    assert windows("qwen2", sliding_window=None, layer_types=["full_attention"] * 2) == (None, None)
    assert windows("smollm3", sliding_window=4, layer_types=mixed, use_sliding_window=False) == (None, None)


def test_a_model_without_a_full_layer_is_refused():
    config = SimpleNamespace(model_type="mistral", num_hidden_layers=2, sliding_window=4)
    with pytest.raises(UserError, match=r"no full-attention layer .*4 tokens.* use method=full"):
        families.require_full_layer(config)
    config.sliding_window = None
    families.require_full_layer(config)


@pytest.mark.parametrize(
    "config, sentence",
    [
        ({"model_type": "gemma2"}, "caps its attention scores"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "caps its attention scores"),
        ({"model_type": "gemma3n_text"}, "shares keys and values between layers"),
        ({"model_type": "gemma4"}, "shares keys and values between layers"),
        ({"model_type": "deepseek_v32"}, "sparse attention"),
        ({"model_type": "glm_moe_dsa"}, "sparse attention"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "is an encoder-decoder"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "attends in both directions"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "dynamic"}}, "length of each call"),
        ({"model_type": "olmo3", "rope_parameters": {"a": {"rope_type": "longrope"}}}, "'longrope'"),
    ],
)
def test_models_that_cannot_be_served_are_refused_in_one_line(config, sentence):
    with pytest.raises(UserError) as caught:
        families.of(SimpleNamespace(**config))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "use one of cohere2, " in str(caught.value)


def test_an_unknown_type_gets_the_nearest_known_one():
    sentence = r"unknown model type 'qwen3x', did you mean 'qwen3'\?; use one of cohere2, "
    with pytest.raises(UserError, match=sentence):
        families.of(SimpleNamespace(model_type="qwen3x"))
