"""Rotary helpers: turn a tapped query by the model's own table, at positions of our choice."""

from __future__ import annotations

from typing import Any

import torch

from kvexp.attention import families


def rotate(
    model: Any, query: torch.Tensor, positions: torch.Tensor, layer_index: int, scaled: bool = False
) -> torch.Tensor:
    """Return q [B, H, T, D] rotated at `positions` [T], as layer `layer_index` of `model` would.

    The result has the pairs where they were (MLA's own code also reorders them, which no dot product sees).
    The table's attention scaling (YaRN) is divided out, so that the map is a pure rotation, unless `scaled`.
    """
    config = model.config.get_text_config()
    family = families.of(config)
    if not family.rotated(config)[layer_index]:
        return query
    rotary = model.base_model.rotary_emb
    kind = (config.layer_types[layer_index],) if family.typed_rotary else ()
    like = query.new_empty(0, dtype=torch.float32)  # the table takes its device and dtype from here
    scaling = 1.0 if scaled else attention_scaling(model, layer_index)
    tables = rotary(like, positions.to(query.device)[None], *kind)
    cos, sin = (each_angle(table[0] / scaling, family.table).to(query.dtype) for table in tables)
    width = 2 * cos.shape[-1]
    adjacent = family.query_pairing(config) != "halves"
    if family.latent:  # the last numbers rotate, elsewhere the first ones
        still, turning = query[..., :-width], query[..., -width:]
        return torch.cat([still, _turn(turning, cos, sin, adjacent)], dim=-1)
    turning, still = query[..., :width], query[..., width:]
    return torch.cat([_turn(turning, cos, sin, adjacent), still], dim=-1)


def each_angle(table: torch.Tensor, layout: families.Table) -> torch.Tensor:
    """Return one number for each angle, [T, R/2], from a table [T, R] in the model's layout."""
    if layout == "tiled":
        return table[..., : table.shape[-1] // 2]
    return table[..., ::2] if layout == "repeated" else table


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, adjacent: bool) -> torch.Tensor:
    left, right = (x[..., ::2], x[..., 1::2]) if adjacent else x.chunk(2, dim=-1)
    left, right = left * cos - right * sin, right * cos + left * sin
    return torch.stack([left, right], dim=-1).flatten(-2) if adjacent else torch.cat([left, right], dim=-1)


def attention_scaling(model: Any, layer_index: int) -> float:
    """Return the factor that the rotary table of a layer puts on rotated queries and keys (YaRN; else 1)."""
    config = model.config.get_text_config()
    kind = f"{config.layer_types[layer_index]}_" if families.of(config).typed_rotary else ""
    return float(getattr(model.base_model.rotary_emb, f"{kind}attention_scaling", 1.0))
