"""AgentKVShift with every one of its knobs but random probes, slowly: on `reuse_reference`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch

from kvexp.methods.reuse.agentkvshift import AgentKVShift
from reuse_reference import Reference


class Slow:
    """The method once more, from its description: `cache` is what it leaves, `union` its probes."""

    def __init__(self, method: AgentKVShift, ref: Reference, query: Sequence[int]) -> None:
        self.method, self.ref, self.query, self.cache = method, ref, query, ref.copy()
        self.distances = d_k, d_v, hidden = ref.deviations(method.check)
        self.firsts = {i for unit in ref.units for i in unit[: method.first]}
        self.sets = self._sets([d_k.norm(dim=1).tolist(), d_v.norm(dim=1).tolist()])
        self.union = sorted(self.sets[0] | self.sets[1] | self.firsts)
        self.scale = [1.0] * len(ref.units)
        start = 0
        if method.reads_all:
            start = method.check
            self.cache[:start] = [(k.clone(), v.clone()) for k, v in ref.fresh[:start]]
            hidden = hidden[[ref.tokens.index(i) for i in self.union]]
        else:
            hidden = ref.embed([ref.ids[i] for i in self.union])
        for layer in range(start, ref.layers):
            everywhere = layer == method.check and method.at_check == "fresh"
            if everywhere:
                self.cache[layer] = tuple(x.clone() for x in ref.fresh[layer])  # type: ignore[call-overload]
            plain = everywhere or layer < method.check
            hidden = ref.pass_on(self.cache, self.union, hidden, layer, None if plain else self.correct)

    def _sets(self, scores: list[list[float]]) -> list[set[int]]:
        method, ref = self.method, self.ref
        if method.sets == "shared":
            scores = [[math.hypot(a, b) for a, b in zip(*scores, strict=True)]] * 2
        if method.probes == "query":
            scores = [ref.relevance(self.query)] * 2
        counts = [math.ceil(Fraction(str(method.recompute)) * len(unit)) for unit in ref.units]
        chosen = zip(ref.units, counts, strict=True)
        best = [[ref.best(one, unit[method.first :], n) for one in scores] for unit, n in chosen]
        return [{i for unit in best for i in unit[part]} for part in (0, 1)]

    def weight(self, part: int, token: int, head: int) -> float:
        distance = self.distances[part][token]
        if self.method.weights == "none":
            return 1.0
        of = float(distance[head]) if self.method.weights_by == "per_head" else float(distance.norm())
        return min(of / self.method.clip, 1.0)

    def correct(self, layer: int, rows: Sequence[int], k: torch.Tensor, v: torch.Tensor) -> None:
        method, ref = self.method, self.ref
        for part, fresh in enumerate((k, v)):
            new = dict(zip(rows, fresh, strict=True))
            x, old = self.cache[layer][part], self.cache[layer][part].clone()
            turns = part == 0 and method.average == "pre"
            for number, unit in enumerate(ref.units):
                if part == 0 and layer == method.check and method.drift is not None:
                    self.scale[number] = self.drift(unit)
                mean = self.mean(layer, part, unit, new, old)
                if method.shift not in ("both", ("keys", "values")[part]):
                    continue
                for i in unit:
                    for head in range(ref.kv):
                        shift = mean[head] * self.scale[number] * self.weight(part, i, head)
                        x[i, head] += ref.rotate(shift, i) if turns else shift
            for i in self.union if method.union_fresh else self.sets[part] | self.firsts:
                x[i] = new[i]

    def drift(self, unit: Sequence[int]) -> float:
        """How far a unit's keys are off at the check layer, as a share of the method's knob."""
        counted = [i for i in unit if i not in self.firsts]
        if not self.method.reads_all:
            counted = [i for i in counted if i in self.sets[0]]
        mean = sum(float(self.distances[0][i].norm()) for i in counted) / len(counted)
        return min(1.0, mean / (self.method.drift or 1.0))

    def mean(
        self, layer: int, part: int, unit: Sequence[int], new: dict[int, torch.Tensor], old: torch.Tensor
    ) -> torch.Tensor:
        """The shift [H, D] of a unit before weights."""
        sensors = sorted(set(unit) & self.sets[part])
        if self.method.mean == "oracle":
            sensors = [i for i in unit if i not in self.firsts]
            new = {i: self.ref.fresh[layer][part][i] for i in sensors}
        residuals = [new[i] - old[i] for i in sensors]
        if part == 0 and self.method.average == "pre":
            residuals = [self.ref.rotate(r, -i) for r, i in zip(residuals, sensors, strict=True)]
        mean, n = torch.stack(residuals).mean(0), len(residuals)
        if self.method.shrink == "james_stein":
            for head in range(self.ref.kv):
                error = sum(float((r[head] - mean[head]).square().sum()) for r in residuals)
                size = float(mean[head].square().sum())
                mean[head] *= 0.0 if n < 2 else max(0.0, 1 - error / (n - 1) / n / size)
        return mean


@torch.no_grad()
def reference(
    method: AgentKVShift, ref: Reference, query: Sequence[int]
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[int]]:
    """The rows that the method leaves, and its probes."""
    slow = Slow(method, ref, query)
    return slow.cache, slow.union
