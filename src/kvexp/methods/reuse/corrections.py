"""What AgentKVShift does to a batch: probes, weights, and the correction of each layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvexp.attention.rerotate import Angles, Pair
from kvexp.methods.reuse.checks import checked, counts_of, require_layer
from kvexp.methods.reuse.patched import RowSet, overwrite
from kvexp.methods.reuse.probes import (
    both,
    drawn,
    first_of_units,
    joint,
    relevance,
    residual,
    spread,
    top_of_units,
)
from kvexp.methods.reuse.shift import Mean, Places, mean_of

if TYPE_CHECKING:
    from kvexp.methods.reuse.agentkvshift import AgentKVShift
    from kvexp.methods.reuse.checks import Checked
    from kvexp.methods.reuse.forward import Run


@dataclass
class Correction:
    """The patch of every layer from the check layer on.

    probes: of keys and of values, [B, C] bool; `first` tokens are fresh beside them. weights: of keys and
    values, [B, C] or [B, H, C]. scale [U]: of each unit's shift. truth: every layer under full recompute.
    """

    method: AgentKVShift
    run: Run
    probes: Pair
    first: torch.Tensor
    weights: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    scale: torch.Tensor | None = None
    truth: list[Pair] = field(default_factory=list)
    _places: dict[Any, Places] = field(default_factory=dict, init=False, repr=False)

    @property
    def union(self) -> torch.Tensor:
        """All tokens that are recomputed, [B, C] bool."""
        return self.probes[0] | self.probes[1] | self.first

    def __call__(self, layer: int, rows: RowSet, fresh: Pair, full: Pair) -> None:
        """Shift the units' rows in `full`, and write the fresh rows of the probes."""
        method = self.method
        for part, (new, x) in enumerate(zip(fresh, full, strict=True)):
            name = ("keys", "values")[part]
            if part == 0 and layer == method.check and method.drift is not None and self.scale is None:
                self.scale = self._scale(rows, residual(new, rows.take(x)))
            if method.shift in ("both", name):
                angles = self.run.sheet.angles(layer) if part == 0 and method.average == "pre" else None
                mean = self._mean(layer, part, rows, new, x)
                shift = mean.shrunk() if method.shrink == "james_stein" else mean.mean
                if self.scale is not None:
                    shift = shift * self.scale.to(shift)[:, None, None]
                self._places_of(layer, part, rows, x, angles).add(x, shift)
            takes = self.union if method.union_fresh else self.probes[part] | self.first
            # Rows that the shift also reached and that are recomputed but not fresh keep their shift.
            rows.write(x, new, takes.gather(1, rows.columns))

    def _places_of(
        self, layer: int, part: int, rows: RowSet, x: torch.Tensor, angles: Angles | None
    ) -> Places:
        kind = None if angles is None else self.run.sheet.rotary.kind(layer)
        key = part, kind, x.device, x.shape  # widths of heads may differ between layers
        if key not in self._places:
            self._places[key] = Places.of(rows, x, self.weights[part], angles)
        return self._places[key]

    def _mean(self, layer: int, part: int, rows: RowSet, new: torch.Tensor, x: torch.Tensor) -> Mean:
        sensors = self.probes[part]
        if self.truth:
            sensors = self.run.reusable
            rows = RowSet.of(self.run.geometry, sensors)
            new = rows.take(self.truth[layer][part])
        sensors = (sensors & ~self.first).gather(1, rows.columns)
        angles = None
        if part == 0 and self.method.average == "pre":
            every = self.run.sheet.angles(layer)
            angles = None if every is None else every.at(rows.sequences, rows.columns)
        return mean_of(rows, residual(new, rows.take(x)), sensors, angles)

    def _scale(self, rows: RowSet, residuals: torch.Tensor) -> torch.Tensor:
        """The scale of each unit by the mean distance of its probes' keys."""
        here = (self.probes[0] & ~self.first).gather(1, rows.columns) & rows.valid
        distance = spread(rows, residuals.norm(dim=-1).norm(dim=1))
        return _drift(self.method, self.run, distance, spread(rows, here.to(distance)) > 0)


def repair(method: AgentKVShift, run: Run) -> None:
    """Choose probes and take them through all layers."""
    if not run.geometry.units:
        return
    require_layer(method.id, method.check, run.layers)
    truth = run.full() if method.mean == "oracle" else []
    read = relevance(run) if method.probes == "query" else None
    seen = checked(run, method.check) if method.reads_all else None
    correction = _correction(method, run, seen, read, truth)
    run.report.union = int(correction.union.sum())
    start = 0
    if seen is not None:
        work, start = seen.work, method.check
        if method.at_check == "fresh":
            overwrite(method.check, work.rows, seen.fresh, run.sheet.layer(method.check))
            run.report.written[method.check] = work.count
        work.keep(correction.union)
    else:
        work = run.start(correction.union)
    shifts_from = method.check + (method.at_check == "fresh")
    for layer in range(start, run.layers):
        work.through(layer, correction if layer >= shifts_from else overwrite)


def _correction(
    method: AgentKVShift, run: Run, seen: Checked | None, read: torch.Tensor | None, truth: list[Pair]
) -> Correction:
    geometry = run.geometry
    counts = counts_of(method, run, seen)
    scores = _scores(method, run, seen, read)
    probes = [top_of_units(geometry, one, counts, method.first) for one in scores]
    correction = Correction(
        method, run, (probes[0], probes[-1]), first_of_units(geometry, method.first), truth=truth
    )
    if seen is None:
        return correction
    if method.weights == "clipped":
        distances = (x if method.weights_by == "per_head" else joint(x) for x in seen.deviations)
        keys, values = ((x / method.clip).clamp(max=1) for x in distances)
        correction.weights = keys, values
    if method.drift is not None:
        counted = run.reusable & ~correction.first
        correction.scale = _drift(method, run, joint(seen.deviations[0]), counted)
    return correction


def _scores(
    method: AgentKVShift, run: Run, seen: Checked | None, read: torch.Tensor | None
) -> list[torch.Tensor]:
    """Scores [B, C] by which probes are chosen: of keys and of values, or one for both."""
    if read is not None:
        return [read]
    if method.probes == "random":
        names = ["both"] if method.sets == "shared" else ["keys", "values"]
        return [drawn(run.geometry, f"{method.seed} {name}") for name in names]
    assert seen is not None
    if method.sets == "shared":
        return [both(seen.deviations)]
    return [joint(x) for x in seen.deviations]


def _drift(method: AgentKVShift, run: Run, distance: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """min(1, mean distance / drift) of each unit, [U], over the columns where `counted` [B, C] is true."""
    scales = []
    for unit in run.geometry.units:
        where = counted[unit.sequence, unit.columns].to(distance.device)
        mean = (
            distance[unit.sequence, unit.columns][where].mean()
            if bool(where.any())
            else distance.new_zeros(())
        )
        scales.append((mean / (method.drift or 1.0)).clamp(max=1))
    return torch.stack(scales)
