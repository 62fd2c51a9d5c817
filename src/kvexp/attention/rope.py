"""Rotary helpers: turn a tapped query by the model's own table, at positions of our choice."""

from __future__ import annotations

from typing import Any

import torch

from kvexp.attention import families


def rotate(model: Any, query: torch.Tensor, positions: torch.Tensor, layer_index: int) -> torch.Tensor:
    """Return q [B, H, T, D] rotated at `positions` [T], as layer `layer_index` of `model` would.

    The result has the pairs where they were (MLA's own code also reorders them, which no dot product sees).
    The table's attention scaling (YaRN) is divided out, so that the map is a pure rotation.
    """
    config = model.config.get_text_config()
    family = families.of(config)
    if not family.rotated(config)[layer_index]:
        return query
    rotary = model.base_model.rotary_emb
    kind = (config.layer_types[layer_index],) if family.typed_rotary else ()
    cos, sin = rotary(query.float(), positions.to(query.device)[None], *kind)
    scaling = attention_scaling(model, layer_index)
    cos, sin = cos[0] / scaling, sin[0] / scaling
    width = 2 * (cos.shape[-1] // 2)
    halves = cos[..., : width // 2], sin[..., : width // 2]
    if family.pairing == "adjacent":  # these tables repeat each angle in place
        halves = cos[..., ::2], sin[..., ::2]
    still = query.shape[-1] - width
    first = family.latent  # MLA: the last numbers rotate, elsewhere the first ones
    fixed, turning = (query[..., :still], query[..., still:]) if first else (query[..., width:], query[..., :width])
    adjacent = family.query_pairing(config) != "halves"
    turned = _turn(turning, *(x.to(query.dtype) for x in halves), adjacent)
    return torch.cat([fixed, turned] if first else [turned, fixed], dim=-1)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, adjacent: bool) -> torch.Tensor:
    left, right = (x[..., ::2], x[..., 1::2]) if adjacent else x.chunk(2, dim=-1)
    left, right = left * cos - right * sin, right * cos + left * sin
    return torch.stack([left, right], dim=-1).flatten(-2) if adjacent else torch.cat([left, right], dim=-1)


def attention_scaling(model: Any, layer_index: int) -> float:
    """Return the factor that the rotary table of a layer puts on rotated queries and keys (YaRN; else 1)."""
    config = model.config.get_text_config()
    kind = f"{config.layer_types[layer_index]}_" if families.of(config).typed_rotary else ""
    return float(getattr(model.base_model.rotary_emb, f"{kind}attention_scaling", 1.0))
