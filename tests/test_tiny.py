"""The random models and the byte tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from kvexp import tiny
from kvexp.attention import families
from kvexp.errors import UserError

TOKENIZER = tiny.tokenizer()
IDS = torch.tensor([TOKENIZER.encode("which card is it?\nlabel: blue\n" * 2)])
PRESETS = sorted((Path(__file__).parent / "presets").glob("*.json"))


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_survives_the_tokenizer(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids) == text


def test_a_token_is_a_byte():
    assert len(TOKENIZER) == tiny.VOCABULARY == 259
    assert len(TOKENIZER.encode(" d\u00e9j\u00e0")) == len(" d\u00e9j\u00e0".encode())
    specials = [TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id]
    assert specials == [256, 257, 258]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_runs_and_attends_sharply(family):
    model = tiny.build(family)
    config = model.config
    assert config.model_type == family
    assert not model.training and not any(weight.requires_grad for weight in model.parameters())
    assert [config.bos_token_id, config.eos_token_id, config.pad_token_id] == [256, 257, 258]
    output = model(IDS, output_attentions=True)
    assert output.logits.shape == (1, IDS.shape[1], tiny.VOCABULARY)
    for weights in output.attentions:
        # A uniform distribution over the last row's keys would have the entropy of all of them.
        last = weights[0, :, -1].clamp_min(1e-12)
        entropy = -(last * last.log()).sum(-1)
        assert entropy.mean() < 0.85 * last.gt(1e-11).sum(-1).float().log().mean()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_seed_names_the_weights(family):
    state = torch.get_rng_state()
    first, second, other = tiny.build(family), tiny.build(family), tiny.build(family, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first(IDS).logits, second(IDS).logits)
    assert not torch.allclose(first(IDS).logits, other(IDS).logits, atol=1e-2)


def test_eager_and_sdpa_agree():
    for family in set(tiny.FAMILIES) - {"gpt_oss"}:
        model = tiny.build(family)
        eager = model(IDS).logits
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(model(IDS).logits, eager, atol=1e-4, rtol=1e-4)


def test_changes_replace_entries_of_the_configuration():
    assert tiny.build("llama", changes={"num_hidden_layers": 1}).config.num_hidden_layers == 1


def test_an_unknown_family_gets_the_nearest_name():
    with pytest.raises(UserError, match="no tiny model 'gpt-oss', did you mean 'gpt_oss'"):
        tiny.build("gpt-oss")


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_reduced_preset_keeps_what_attention_depends_on(path):
    entries = json.loads(path.read_text())
    kept = {key: value for key, value in entries.items() if key not in ("model_type", "quantization_config")}
    real, model = AutoConfig.for_model(entries["model_type"], **kept), tiny.reduced(entries)
    config, family = model.config, families.of(model.config)
    assert family == families.of(real)
    assert config.num_hidden_layers == 2
    assert family.query_dim(config) == family.query_dim(real)
    groups = config.num_attention_heads // config.num_key_value_heads
    assert groups == real.num_attention_heads // real.num_key_value_heads
    assert config.rope_parameters == real.rope_parameters
    assert config.max_position_embeddings == real.max_position_embeddings
    assert set(families.layer_windows(config)) == set(families.layer_windows(real))
    assert sum(weight.numel() for weight in model.parameters()) < 5e6
    assert model(IDS).logits.isfinite().all()


def test_the_windows_of_the_presets_are_the_published_ones():
    def windows(name):
        entries = json.loads((PRESETS[0].parent / f"{name}.json").read_text())
        entries.pop("quantization_config", None)
        return families.layer_windows(AutoConfig.for_model(entries.pop("model_type"), **entries))

    assert windows("gpt-oss-20b") == (128, None) * 12
    assert windows("mistral-7b-instruct-v0.3") == (None,) * 32
    assert windows("deepseek-r1-distill-qwen-7b") == (None,) * 28
