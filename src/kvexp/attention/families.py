"""What differs between model families: where the pre-rotary query is, how it rotates, what each layer sees.

Everything is read from a configuration, before weights are loaded, and nothing here imports torch. A family
is looked up by `config.model_type`: two families can give tensors of the same shape and mean different axes,
so a layout is never guessed from a shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvexp.errors import UserError, suggest

if TYPE_CHECKING:
    from torch import Tensor

Layout = Literal["flat", "split", "heads", "fused"]
Pairing = Literal["halves", "adjacent", "adjacent_to_halves"]
Table = Literal["tiled", "repeated", "single"]


@dataclass(frozen=True)
class Family:
    """How the attention modules of one model type are built.

    tap: submodule of the attention module whose output is the query just before rotation.
    layout: that output: `flat` [B, T, Hq*D], `split` [B, T, Hq, D], `heads` [B, Hq, T, D],
        `fused` [B, T, (Hq + 2 Hkv)*D] with the query in front.
    windows: which layers are limited to a sliding window: `none`, `every` (if the configuration sets one) or
        `typed` (those that `config.layer_types` calls sliding).
    pairing: which two numbers rotate together: i and i + R/2 (`halves`), 2i and 2i + 1 (`adjacent`), or
        adjacent ones that come out as halves (`adjacent_to_halves`, MLA).
    table: how the model's cos and sin [B, T, R] hold the R/2 angles: one copy after the other (`tiled`),
        each angle twice in a row (`repeated`), or only once, [B, T, R/2] (`single`).
    partial: only a part R of a head rotates: the first numbers, in MLA the last `qk_rope_head_dim`.
    latent: multi-head latent attention: the cache holds one latent row for all heads.
    typed_rotary: the rotary table depends on the layer type (`rotary_emb(x, positions, layer_type)`).
    """

    model_type: str
    tap: str = "q_proj"
    layout: Layout = "flat"
    windows: Literal["none", "every", "typed"] = "none"
    pairing: Pairing = "halves"
    table: Table = "tiled"
    partial: bool = False
    latent: bool = False
    typed_rotary: bool = False

    def site(self, config: Any) -> str:
        """Return the name of the tapped submodule for this configuration."""
        if self.tap == "q_b_proj" and config.q_lora_rank is None:
            return "q_proj"
        if self.model_type == "glm4_moe" and not config.use_qk_norm:
            return "q_proj"
        return self.tap

    def tap_layout(self, config: Any) -> Layout:
        """Return the layout of the tapped output for this configuration."""
        return "flat" if self.site(config) == "q_proj" else self.layout

    def query_heads(self, output: Tensor, config: Any) -> Tensor:
        """Return the tapped output as q_pre [B, Hq, T, D] (a view where one is possible)."""
        layout = self.tap_layout(config)
        if layout == "heads":
            return output
        if layout != "split":
            heads, dim = config.num_attention_heads, self.query_dim(config)
            output = output[..., : heads * dim].unflatten(-1, (heads, dim))
        return output.transpose(1, 2)

    def query_dim(self, config: Any) -> int:
        """Return D, the length of one head's query."""
        if self.latent:
            return config.qk_nope_head_dim + config.qk_rope_head_dim
        return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def query_pairing(self, config: Any) -> Pairing:
        """Return which numbers of a query rotate together in this configuration."""
        if self.latent and not config.rope_interleave:
            return "halves"
        return self.pairing

    def rotated(self, config: Any) -> tuple[bool, ...]:
        """Return, for each layer, whether it rotates queries and keys at all."""
        layers = range(config.num_hidden_layers)
        if self.model_type == "smollm3":
            return tuple(bool(config.no_rope_layers[i]) for i in layers)
        if self.model_type == "cohere2":
            return tuple(config.layer_types[i] == "sliding_attention" for i in layers)
        return (True,) * config.num_hidden_layers


_TABLE = (
    Family("cohere2", windows="typed", pairing="adjacent", table="repeated"),
    Family("deepseek_v3", tap="q_b_proj", pairing="adjacent_to_halves", partial=True, latent=True),
    Family("gemma3_text", tap="q_norm", layout="heads", windows="typed", typed_rotary=True),
    Family("glm4", pairing="adjacent", partial=True),
    Family("glm4_moe", tap="q_norm", layout="split", partial=True),
    Family("glm4_moe_lite", tap="q_b_proj", pairing="adjacent_to_halves", partial=True, latent=True),
    Family("gpt_oss", windows="typed", table="single"),
    Family("llama"),
    Family("mistral", windows="every"),
    Family("olmo2", tap="q_norm"),
    Family("olmo3", tap="q_norm", windows="typed", typed_rotary=True),
    Family("phi3", tap="qkv_proj", layout="fused", windows="every", partial=True),
    Family("qwen2", windows="typed"),
    Family("qwen3", tap="q_norm", layout="split", windows="typed"),
    Family("qwen3_moe", tap="q_norm", layout="split", windows="every"),
    Family("smollm3", windows="typed"),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _TABLE}

_SHARED_CACHE = "shares keys and values between layers, so that those layers have no cache of their own"
_SPARSE = "selects the keys it attends to by itself (sparse attention with an indexer)"
_SOFTCAP = "caps its attention scores (softcap), and capped attention cannot be merged from parts"
_REFUSED = {
    "gemma2": _SOFTCAP,
    "vaultgemma": _SOFTCAP,
    "gemma3n": _SHARED_CACHE,
    "gemma3n_text": _SHARED_CACHE,
    "gemma4": _SHARED_CACHE,
    "gemma4_text": _SHARED_CACHE,
    "deepseek_v32": _SPARSE,
    "deepseek_v4": _SPARSE,
    "glm_moe_dsa": _SPARSE,
}


def of(config: Any) -> Family:
    """Return the family of a model configuration, or raise UserError where kvexp cannot serve the model."""
    kind = config.model_type
    reason = _reason(config)
    if reason:
        raise UserError(f"models of type '{kind}' cannot be used: this one {reason}; use one of {_known()}")
    if kind not in FAMILIES:
        raise UserError(f"unknown model type '{kind}'{suggest(kind, FAMILIES)}; use one of {_known()}")
    return FAMILIES[kind]


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Return each layer's sliding window in tokens (its own token counts), None where it sees all."""
    family, window = of(config), getattr(config, "sliding_window", None)
    layers = config.num_hidden_layers
    if family.windows == "none" or window is None:
        return (None,) * layers
    if family.windows == "every":
        return (window,) * layers
    if family.model_type == "smollm3" and not config.use_sliding_window:
        return (None,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types[:layers])


def require_full_layer(config: Any) -> None:
    """Raise UserError unless a layer attends to the whole context: else nothing can be evicted or stored."""
    widest = 0
    for window in layer_windows(config):
        if window is None:
            return
        widest = max(widest, window)
    raise UserError(
        f"this '{config.model_type}' model has no full-attention layer (each sees at most {widest} tokens), "
        "so eviction and memory have nothing to do: use method=full or another model"
    )


def _reason(config: Any) -> str | None:
    """Return why the model cannot be used, as the end of "this one ...", or None."""
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder"
    if config.model_type in _REFUSED:
        return _REFUSED[config.model_type]
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return _SOFTCAP
    if getattr(config, "use_bidirectional_attention", None):
        return "attends in both directions"
    rope = getattr(config, "rope_parameters", None) or {}
    tables = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    for kind in (table.get("rope_type") for table in tables):
        if kind in ("dynamic", "longrope"):
            return f"has a rotary table that changes with the length of each call (rope type '{kind}')"
    return None


def _known() -> str:
    return ", ".join(FAMILIES)
