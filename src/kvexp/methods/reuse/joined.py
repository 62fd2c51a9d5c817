"""One batch of caches that were made one after the other, padded on the left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch.nn.functional import pad

from kvexp.attention.families import layer_windows
from kvexp.attention.options import options_of
from kvexp.cache.kv_cache import KVCache
from kvexp.methods.reuse.forward import ReusedCache
from kvexp.methods.reuse.geometry import Geometry
from kvexp.methods.reuse.report import Report
from kvexp.methods.reuse.sheet import filled
from kvexp.prompt import Context


def joined(model: Any, contexts: Sequence[Context], caches: Sequence[KVCache]) -> ReusedCache:
    """Return the cache of a batch from those of its contexts, of which one at least has tokens.

    Each cache holds dense layers of one sequence; an empty context has an empty cache, and no report. Counts
    and times add up.
    """
    device = model.get_input_embeddings().weight.device
    geometry = Geometry.of(contexts, [], device)
    width, backend = geometry.width, options_of(model).backend
    positions, clean = geometry.positions[:, :width], 0 if geometry.padded else geometry.width
    layers = []
    for index, window in enumerate(layer_windows(model.config.get_text_config())):
        held = [cache.layers[index] if cache.seen else None for cache in caches]
        keys, values = (
            _stacked([getattr(one, part, None) for one in held], width) for part in ("keys", "values")
        )
        layers.append(filled(keys, values, positions, window, backend, clean))
    columns = geometry.real[:, :width] if geometry.padded else None
    reports = [cache.report for cache in caches if isinstance(cache, ReusedCache)]
    return ReusedCache(layers, added(reports), columns)


def added(reports: Sequence[Report]) -> Report:
    """Return one report on all contexts of several."""
    total = Report(reports[0].layers, sum(report.tokens for report in reports))
    for field in fields(Report):
        given = [getattr(report, field.name) for report in reports]
        if field.name in ("computed", "written"):
            setattr(total, field.name, [sum(counts) for counts in zip(*given, strict=True)])
        elif field.name not in ("layers", "tokens"):
            setattr(total, field.name, sum(given))
    return total


def _stacked(parts: Sequence[torch.Tensor | None], width: int) -> torch.Tensor:
    """Return rows [1, H, S, D] of each sequence as [B, H, width, D]: at the right, zeros before them.

    Zeros stand where a sequence is padded, and for rows that have left a window; None: no row at all.
    """
    like = next(part for part in parts if part is not None)
    empty = like[:, :, :0]
    padded = [pad(one, (0, 0, width - one.shape[2], 0)) for one in (empty if p is None else p for p in parts)]
    return torch.cat(padded)
