"""Small random models of every family, built in code: for tests, and to try a method without a download.

`build` gives a model of two or three narrow layers, `reduced` cuts the configuration of a real model down to
two layers of the same architecture. Weights are random and the same for the same seed, scaled so that
attention is far from uniform and that biases, norms and sinks all matter. The tokenizer has one token a byte.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvexp.attention import families
from kvexp.errors import UserError, suggest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_BYTES = 256
_SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
VOCABULARY = _BYTES + len(_SPECIAL)
"""Number of tokens of the byte tokenizer."""

_WIDTH: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32768,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_PAIR = ["sliding_attention", "full_attention"]
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_THIRDS = {"num_attention_heads": 6, "hidden_size": 48}
_TINY: dict[str, dict[str, Any]] = {
    "cohere2": {"layer_types": _PAIR, "sliding_window": 8},
    "deepseek_v3": {**_LATENT, **_ROUTED, "first_k_dense_replace": 1, "num_mtp_layers": 0},
    "gemma3_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_hidden_layers": 3,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
    },
    "glm4": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
    "glm4_moe": {**_ROUTED, "first_k_dense_replace": 1, "use_qk_norm": True, "num_mtp_layers": 0},
    "glm4_moe_lite": {**_LATENT, **_ROUTED, "v_head_dim": 24, "mlp_layer_types": ["dense", "sparse"]},
    "gpt_oss": {
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "layer_types": _PAIR,
        "sliding_window": 8,
        "max_position_embeddings": 131072,
    },
    "llama": {**_THIRDS, "num_hidden_layers": 3},
    "mistral": {"sliding_window": 8},
    "olmo2": {},
    "olmo3": {"layer_types": _PAIR, "sliding_window": 8},
    "phi3": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.75}},
    "qwen2": {},
    "qwen3": {**_THIRDS},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4},
    "smollm3": {"no_rope_layers": [1, 0]},
}
FAMILIES = tuple(_TINY)
"""Model types that `build` knows."""

_SHARP = ("q_proj", "k_proj", "qkv_proj", "q_b_proj", "kv_b_proj", "q_norm", "k_norm")


def build(family: str, seed: int = 0, changes: Mapping[str, Any] | None = None) -> PreTrainedModel:
    """Return a tiny random float32 model of this model type, in evaluation mode.

    `changes` replaces entries of its configuration. Raises UserError for a family that is not in FAMILIES.
    """
    if family not in _TINY:
        raise UserError(f"no tiny model '{family}'{suggest(family, _TINY)}; known: {', '.join(_TINY)}")
    entries = {"model_type": family, **_WIDTH, **_TINY[family]}
    if families.FAMILIES[family].latent:
        del entries["head_dim"]
    return _random_model({**entries, **(changes or {})}, seed)


def reduced(config: Mapping[str, Any], seed: int = 0) -> PreTrainedModel:
    """Return a random model of two layers with the architecture of a real one.

    Kept from `config` (the content of a config.json): head dims, group size, rotary scaling, norms, windows,
    sinks, latent ranks, and one layer of each kind. Cut: width, heads (to two groups), experts, vocabulary
    (to bytes).
    """
    cut = copy.deepcopy(dict(config))
    cut.pop("quantization_config", None)
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    group = heads // kv_heads
    if not families.FAMILIES[config["model_type"]].latent:
        cut.setdefault("head_dim", config["hidden_size"] // heads)
    cut["num_key_value_heads"] = min(2, kv_heads)
    cut["num_attention_heads"] = group * cut["num_key_value_heads"]
    # Some configurations want a width that the number of heads divides.
    width = -(-128 // cut["num_attention_heads"]) * cut["num_attention_heads"]
    cut.update(num_hidden_layers=2, hidden_size=width, intermediate_size=192)
    cut.update(_two_layers(config))
    if "moe_intermediate_size" in cut:
        cut["moe_intermediate_size"] = 64
    for key in ("num_local_experts", "n_routed_experts", "num_experts"):
        if key in cut:
            cut[key] = 4
    if "num_experts_per_tok" in cut:
        cut.update(num_experts_per_tok=2)
    return _random_model(cut, seed)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte of UTF-8: any text comes back exactly, nothing is added."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(list(_SPECIAL.values()))
    return PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=False, **_SPECIAL)


def _two_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that list layers, cut to two: one of each kind where there are two."""
    cut: dict[str, Any] = {}
    kinds = config.get("layer_types")
    if kinds:
        cut["layer_types"] = _PAIR if len(set(kinds)) > 1 else list(kinds[:2])
    if config.get("mlp_layer_types"):
        cut["mlp_layer_types"] = ["dense", "sparse"]
    if config.get("first_k_dense_replace"):
        cut["first_k_dense_replace"] = 1
    if "num_nextn_predict_layers" in config:
        cut["num_nextn_predict_layers"] = 0
    return cut


def _random_model(entries: dict[str, Any], seed: int) -> PreTrainedModel:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    special = {f"{name}_id": _BYTES + i for i, name in enumerate(_SPECIAL)}
    entries = {**entries, **special, "vocab_size": VOCABULARY, "dtype": "float32"}
    config = AutoConfig.for_model(entries.pop("model_type"), **entries)
    families.of(config)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    fill(model, seed)
    return model.eval().requires_grad_(False)


def fill(model: PreTrainedModel, seed: int) -> None:
    """Overwrite every weight with seeded random numbers that make attention sharp (scores of about 2)."""
    import torch

    numbers = torch.Generator().manual_seed(seed)
    centre = 0.0 if model.config.model_type == "gemma3_text" else 1.0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            random = torch.randn(weight.shape, generator=numbers)
            gain = 1.5 if any(f".{part}." in name for part in _SHARP) else 1.0
            if weight.dim() > 1:
                weight.copy_(random * gain / weight.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                weight.copy_(random * 0.3)
            elif name.endswith("sinks"):
                weight.copy_(random)
            else:
                weight.copy_(centre + (gain - 1.0) + random * 0.1)
        for name, values in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                values.copy_(torch.randn(values.shape, generator=numbers) * 0.05)
