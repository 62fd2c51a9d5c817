"""Tripwires: what kvexp takes for granted in transformers, so that an upgrade fails here first."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

import helpers
from kvexp import tiny
from probe import NAME, Layer, Probe

WITHOUT_WINDOW = {"deepseek_v3", "glm4", "glm4_moe", "glm4_moe_lite", "llama", "olmo2"}
LATENT = {"deepseek_v3", "glm4_moe_lite"}
TWO_KINDS = {"cohere2", "gemma3_text", "gpt_oss", "olmo3"}
PROMPT = torch.tensor([helpers.tokens(7)])

each_family = pytest.mark.parametrize("family", tiny.FAMILIES)


@each_family
def test_attention_gets_the_keywords_of_its_family(family: str) -> None:
    with Probe(family) as probe:
        probe.model(PROMPT, cache=probe.cache())
    assert [call[0] for call in probe.calls] == probe.modules()
    for keywords in probe.keywords:
        assert {"dropout", "scaling", "position_ids"} <= keywords.keys()
        assert isinstance(keywords["scaling"], float)
        assert ("sliding_window" in keywords) == (family not in WITHOUT_WINDOW)
        assert ("s_aux" in keywords) == (family == "gpt_oss")
        assert keywords.get("softcap") is None
        assert ("use_cache" in keywords) == (family != "gemma3_text")


@each_family
def test_attention_gets_queries_and_keys_by_head(family: str) -> None:
    with Probe(family) as probe:
        probe.model(PROMPT.expand(2, -1), cache=probe.cache())
    config = probe.model.config
    heads = config.num_attention_heads
    for _, query, key, value, _ in probe.calls:
        stored = heads if family in LATENT else config.num_key_value_heads
        assert query.shape[:3] == (2, heads, 7)
        assert key.shape[:3] == value.shape[:3] == (2, stored, 7)
        assert query.shape[-1] == key.shape[-1]


def test_sinks_come_one_a_head() -> None:
    with Probe("gpt_oss") as probe:
        probe.model(PROMPT, cache=probe.cache())
    for module, keywords in zip(probe.modules(), probe.keywords, strict=True):
        assert keywords["s_aux"] is module.sinks
        assert module.sinks.shape == (probe.model.config.num_attention_heads,)


def test_soft_capped_models_pass_softcap() -> None:
    config = Gemma2Config(
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, pad_token_id=0, attn_logit_softcapping=50.0,
    )  # fmt: skip
    with Probe("llama") as probe:
        model = Gemma2ForCausalLM(config).eval()
        model.set_attn_implementation(NAME)
        model(torch.tensor([[1, 2]]))
    assert probe.keywords[0]["softcap"] == 50.0


@each_family
def test_update_gets_the_keyword_dict_that_attention_gets(family: str) -> None:
    with Probe(family) as probe:
        cache = probe.cache()
        probe.model(PROMPT, cache=cache)
    for layer, keywords in zip(cache.layers, probe.keywords, strict=True):
        (given,) = layer.given
        assert set(given) == {"kwargs"}
        assert keywords["marker"] is layer
        assert given["kwargs"]["position_ids"] is keywords["position_ids"]


@each_family
def test_attention_gets_what_update_returned(family: str) -> None:
    with Probe(family) as probe:
        cache = probe.cache()
        probe.model(PROMPT, cache=cache)
    for layer, (module, _, key, value, _) in zip(cache.layers, probe.calls, strict=True):
        rows = layer.returned[0]
        if family in LATENT:
            config = probe.model.config
            assert rows[0].shape == (1, 1, 7, config.kv_lora_rank)
            assert rows[1].shape == (1, 1, 7, config.qk_rope_head_dim)
            rows = module.expand_kv(*rows)
            assert torch.equal(rows[0], key) and torch.equal(rows[1], value)
            assert value.shape[-1] == config.v_head_dim
        else:
            assert rows[0] is key and rows[1] is value


@each_family
def test_position_ids_are_always_passed(family: str) -> None:
    pads = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    places = (pads.cumsum(-1) - 1).clamp(min=0)
    with Probe(family) as probe:
        probe.model(PROMPT, cache=probe.cache())
        probe.model(PROMPT, cache=probe.cache(seen=5))
        probe.model(PROMPT.expand(2, -1), cache=probe.cache(), attention_mask=pads, position_ids=places)
    layers = len(probe.modules())
    for call, expected in enumerate((torch.arange(7)[None], torch.arange(5, 12)[None], places)):
        for keywords in probe.keywords[call * layers : (call + 1) * layers]:
            assert torch.equal(keywords["position_ids"], expected)


@each_family
def test_the_mask_function_is_called_once_a_kind_and_may_return_any_object(family: str) -> None:
    pads = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    with Probe(family) as probe:
        probe.model(PROMPT, cache=probe.cache(), attention_mask=pads)
        assert len(probe.masks) == (2 if family in TWO_KINDS else 1)
        for given in probe.masks:
            assert torch.equal(given["attention_mask"], pads.bool())
        assert all(call[-1] is probe for call in probe.calls)
        probe.masks.clear()
        probe.model(PROMPT, cache=probe.cache())
        assert probe.masks and all(given["attention_mask"] is None for given in probe.masks)


def test_without_a_mask_function_of_the_same_name_padding_is_lost() -> None:
    with Probe("llama", mask=False) as probe:
        probe.model(PROMPT, cache=probe.cache(), attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1, 1]]))
    assert all(call[-1] is None for call in probe.calls)


@each_family
def test_a_ready_made_mask_passes_by_the_mask_function(family: str) -> None:
    ready = torch.zeros(1, 1, 7, 7)
    with Probe(family) as probe:
        probe.model(PROMPT, cache=probe.cache(), attention_mask=ready)
    assert not probe.masks
    assert all(call[-1] is ready for call in probe.calls)


@each_family
def test_generate_forwards_exactly_the_ids_that_the_cache_has_not_seen(family: str) -> None:
    with Probe(family) as probe:
        cache = probe.cache(seen=4)
        probe.model.generation_config.eos_token_id = None
        made = probe.model.generate(PROMPT, cache=cache, max_new_tokens=3, do_sample=False)
    assert len(probe.inputs) == 3
    assert torch.equal(probe.inputs[0]["input_ids"], PROMPT[:, 4:])
    assert [given["input_ids"].shape[1] for given in probe.inputs] == [3, 1, 1]
    assert torch.equal(probe.inputs[2]["input_ids"], made[:, 8:9])
    assert [given["position_ids"].tolist() for given in probe.inputs] == [[[4, 5, 6]], [[7]], [[8]]]
    assert all(given["cache"] is cache for given in probe.inputs)
    assert [layer.seen for layer in cache.layers] == [9] * len(cache.layers)


def test_generate_counts_positions_over_real_tokens() -> None:
    pads = torch.tensor([[1, 1, 1, 1, 0, 1, 1], [1] * 7])
    with Probe("llama") as probe:
        probe.model.generation_config.eos_token_id = None
        probe.model.generate(
            PROMPT.expand(2, -1), cache=probe.cache(seen=4), attention_mask=pads, max_new_tokens=2
        )
    first, second = (given["position_ids"] for given in probe.inputs)
    assert first[:, 1:].tolist() == [[4, 5], [5, 6]]
    assert second.tolist() == [[6], [7]]
    assert probe.masks[1]["attention_mask"].shape == (2, 8)


def test_generate_drops_a_mask_of_ones() -> None:
    with Probe("llama") as probe:
        probe.model.generate(
            PROMPT, cache=probe.cache(seen=4), attention_mask=torch.ones_like(PROMPT), max_new_tokens=1
        )
    assert probe.masks[0]["attention_mask"] is None


def test_generate_tells_the_model_that_the_cache_is_not_used() -> None:
    with Probe("llama") as probe:
        probe.model.generate(PROMPT, cache=probe.cache(), use_cache=False, max_new_tokens=2)
    assert [given["use_cache"] for given in probe.inputs] == [False, False]
    assert [given["input_ids"].shape[1] for given in probe.inputs] == [7, 8]


def test_a_hook_may_add_a_keyword_for_attention() -> None:
    with Probe("llama") as probe:
        hooks = [
            module.register_forward_pre_hook(
                lambda module, args, kwargs: (args, {**kwargs, "added": module.layer_idx}), with_kwargs=True
            )
            for module in probe.modules()
        ]
        probe.model(PROMPT, cache=probe.cache())
        for hook in hooks:
            hook.remove()
    assert [keywords["added"] for keywords in probe.keywords] == [0, 1, 2]


@each_family
def test_switching_the_implementation_back_leaves_logits_bit_identical(family: str) -> None:
    model = helpers.model(family)
    before = helpers.plain_logits(model, PROMPT[0].tolist())
    implementation = model.config._attn_implementation
    with Probe(family) as probe:
        assert model.config._attn_implementation == NAME
        during = probe.model(PROMPT).logits[0]
    assert model.config._attn_implementation == implementation
    assert not torch.allclose(during, before, atol=1e-3)
    assert torch.equal(helpers.plain_logits(model, PROMPT[0].tolist()), before)


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises((ValueError, ImportError)):
        helpers.model("llama").set_attn_implementation("nobody_registered_this")


def test_a_cache_layer_has_five_abstract_methods() -> None:
    assert CacheLayerMixin.__abstractmethods__ == {
        "lazy_initialization",
        "update",
        "get_mask_sizes",
        "get_seq_length",
        "get_max_length",
    }
    assert (CacheLayerMixin.is_compileable, CacheLayerMixin.is_croppable) == (False, False)


def test_a_cache_passes_batch_changes_on_to_its_layers() -> None:
    cache = Cache(layers=[Layer(seen=1), Layer(seen=1)])
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_select_indices(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    assert [layer.done for layer in cache.layers] == [["reorder", "select", "repeat"]] * 2


def test_the_length_of_a_cache_is_that_of_its_first_layer() -> None:
    assert Cache(layers=[Layer(seen=3), Layer(seen=8)]).get_seq_length() == 3


@each_family
def test_the_model_takes_a_cache_by_that_name_without_a_warning(family: str) -> None:
    model = helpers.model(family)
    cache = DynamicCache(config=model.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = model(PROMPT, cache=cache, logits_to_keep=2)
    assert output.logits.shape == (1, 2, tiny.VOCABULARY)
    assert cache.get_seq_length() == 7


@each_family
def test_the_rotary_table_takes_positions_and_of_the_states_only_the_dtype(family: str) -> None:
    model, positions = helpers.model(family), torch.tensor([[3, -2]])
    rotary = model.base_model.rotary_emb
    kind = (model.config.layer_types[0],) if family in ("gemma3_text", "olmo3") else ()
    cos, sin = rotary(torch.empty(0), positions, *kind)
    again = rotary(torch.randn(1, 2, 64), positions, *kind)
    assert torch.equal(cos, again[0]) and torch.equal(sin, again[1])
    assert cos.shape == sin.shape and cos.shape[:2] == (1, 2)
    scaling = getattr(rotary, f"{kind[0]}_attention_scaling" if kind else "attention_scaling")
    torch.testing.assert_close((cos**2 + sin**2).sqrt(), torch.full_like(cos, scaling))
