"""Choosing tokens: by how far their fresh rows are from the reused ones, by what a question reads, at random.

Scores are [B, C] over the columns of a batch, float32 at least; ties go to the lower column.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from kvexp.attention.families import layer_windows
from kvexp.attention.function import Call
from kvexp.attention.rerotate import Pair
from kvexp.methods.reuse.geometry import Geometry, Unit
from kvexp.methods.reuse.patched import RowSet, overwrite

if TYPE_CHECKING:
    from kvexp.methods.reuse.forward import Run, Work

RELEVANCE_ROWS = 16  # tokens of a question whose weights stand in memory at once
Count = Callable[[int], int]  # from a unit's tokens to how many of them are chosen


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return x in float32, or as it is in float64."""
    return x if x.dtype == torch.float64 else x.float()


def residual(fresh: torch.Tensor, reused: torch.Tensor) -> torch.Tensor:
    """Return fresh minus reused rows, in float32 at least."""
    return wide(fresh) - wide(reused)


def spread(rows: RowSet, values: torch.Tensor) -> torch.Tensor:
    """Return values [..., R] of rows as [..., C] of columns, zero elsewhere; leading axes [B, ...]."""
    shape = (*values.shape[:-1], rows.geometry.ids.shape[1])
    columns, valid = rows.columns.to(values.device), rows.valid.to(values.device)
    while columns.dim() < values.dim():
        columns, valid = columns[:, None], valid[:, None]
    return values.new_zeros(shape).scatter_(-1, columns.expand(values.shape), values * valid)


def deviations(run: Run, work: Work, layer: int, fresh: Pair) -> Pair:
    """Return ||fresh - reused|| of the rows in a layer, (of keys, of values), each [B, H, C]."""
    reused = run.sheet.layer(layer, fresh)
    keys, values = (
        spread(work.rows, residual(new, work.rows.take(old)).norm(dim=-1))
        for new, old in zip(fresh, reused, strict=True)
    )
    return keys, values


def joint(deviation: torch.Tensor) -> torch.Tensor:
    """Return the deviation over all heads together, [B, H, C] to [B, C]."""
    return deviation.norm(dim=1)


def both(deviations: Pair) -> torch.Tensor:
    """Return the deviation of keys and values together, over all heads, [B, C]."""
    keys, values = (joint(x).to(deviations[0].device) for x in deviations)
    return (keys.square() + values.square()).sqrt()


def top_of_units(
    geometry: Geometry, scores: torch.Tensor, counts: Sequence[int], first: int = 0
) -> torch.Tensor:
    """Return [B, C] bool: the `counts[u]` tokens of unit u with the best scores, without its `first` ones."""
    chosen = torch.zeros_like(geometry.real)
    for unit in geometry.units:
        candidates = scores[unit.sequence, unit.columns][first:]
        best = candidates.argsort(descending=True, stable=True)[: counts[unit.number]]
        chosen[unit.sequence, unit.start + first + best.to(chosen.device)] = True
    return chosen


def top_of_contexts(
    geometry: Geometry, scores: torch.Tensor, counts: Sequence[int], among: torch.Tensor | None = None
) -> torch.Tensor:
    """Return [B, C] bool: the tokens of units with the best scores, `counts[u]` for each unit of a context.

    Units of a context compete: one may get more than its own count, another less. `among` [B, C] bool leaves
    out all other tokens.
    """
    among = geometry.in_units() if among is None else among
    chosen = torch.zeros_like(geometry.real)
    order = (
        scores.to(among.device).masked_fill(~among, -torch.inf).argsort(dim=1, descending=True, stable=True)
    )
    for b in range(geometry.batch):
        total = sum(counts[unit.number] for unit in geometry.units if unit.sequence == b)
        chosen[b, order[b, :total]] = True
    return chosen & among


def first_of_units(geometry: Geometry, count: int) -> torch.Tensor:
    """Return [B, C] bool: the first `count` tokens of every unit."""
    chosen = torch.zeros_like(geometry.real)
    for unit in geometry.units:
        chosen[unit.sequence, unit.start : unit.start + min(count, unit.length)] = True
    return chosen


def drawn(geometry: Geometry, seed: str) -> torch.Tensor:
    """Return uniform scores [B, C] that depend on the seed and on the unit's own text alone."""
    scores = torch.zeros(geometry.ids.shape)
    for unit in geometry.units:
        scores[unit.sequence, unit.columns] = torch.tensor(_numbers(geometry, unit, seed))
    return scores.to(geometry.ids.device)


def _numbers(geometry: Geometry, unit: Unit, seed: str) -> list[float]:
    ids = geometry.contexts[unit.sequence].chunks[unit.at]
    name = hashlib.sha256(f"{seed} {','.join(map(str, ids))}".encode()).hexdigest()
    numbers = random.Random(name)
    return [numbers.random() for _ in ids]


def relevance(run: Run) -> torch.Tensor:
    """Return how much the questions read of each column on the rows as they are placed now, [B, C].

    The questions run through all layers over the whole sheet, which stays as it is. In each full-attention
    layer (or in all, where there is none) a token's score is the softmax weight over the tokens of the
    context, header and own unit included and the question itself not, as the mean over question tokens and
    query heads; layers count equally. Learned sinks of a model are left out of the softmax.
    """
    geometry = run.geometry
    work = run.start(geometry.in_query())
    reader = _Reader(run)
    for layer in range(run.layers):
        work.through(layer, overwrite, reader)
    run.report.question_rows += int(geometry.in_query().sum()) * run.layers
    return reader.total / len(reader.layers)


class _Reader:
    """Adds up what the rows of questions attend to, layer by layer."""

    def __init__(self, run: Run) -> None:
        windows = layer_windows(run.model.config.get_text_config())
        self.windows, self.any_full = windows, None in windows
        self.context = run.geometry.in_context()
        self.total = torch.zeros(run.geometry.ids.shape, device=self.context.device)
        self.counts = run.geometry.in_query().sum(1).clamp(min=1)  # [B]
        self.layers: set[int] = set()

    def __call__(self, layer: int, rows: RowSet, call: Call) -> None:
        if self.any_full and self.windows[layer] is not None:
            return
        self.layers.add(layer)
        width = rows.geometry.width
        heads, group = call.key.shape[1], call.query.shape[1] // call.key.shape[1]
        keys = wide(call.key[:, :, :width]).transpose(-1, -2)
        for at in range(0, rows.columns.shape[1], RELEVANCE_ROWS):
            part = slice(at, at + RELEVANCE_ROWS)
            query = wide(call.query[:, :, part]) * call.scale
            rows_of_head = query.unflatten(1, (heads, group)).flatten(2, 3)  # [B, H, G * r, D]
            seen = rows.visible(part, width, self.windows[layer]) & self.context[:, None, None, :width]
            scores = (rows_of_head @ keys).unflatten(2, (group, -1))  # [B, H, G, r, W]
            scores = scores.masked_fill_(~seen[:, None].to(scores.device), -torch.inf)
            weights = (
                scores.softmax(-1).sum((1, 2)).nan_to_num(0.0)
            )  # far beyond a window, no context is seen
            weights = weights * rows.valid[:, part, None].to(weights.device)
            mean = weights.sum(1).to(self.total.device) / (self.counts[:, None] * heads * group)
            self.total[:, :width] += mean
