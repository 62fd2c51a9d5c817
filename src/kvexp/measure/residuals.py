"""Residuals of the units of contexts, layer by layer, and what an estimated shift removes of them.

Fresh rows are those of a full recompute, stored ones those that a method places (keys moved exactly to where
they stand now). Keys are looked at before rotation, each turned back by its own position, and after it;
lengths are the same, means are not. In multi-head latent attention `keys` are the shared rotated key, and
`values` the latent.

A shift is judged on held-out tokens, those of units that its estimator did not recompute. Estimators:

    agentkvshift       the method as it is given: probes of largest divergence, weights
    top_unweighted     the same probes, and the whole shift for every token
    random_unweighted  random probes, and the whole shift for every token
    oracle             the true mean of all tokens of a unit, on the tokens held out by random_unweighted

The first three are run as they run in earnest, so that the error of their own probe pass is in them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kvexp.attention.rerotate import Pair
from kvexp.errors import UserError
from kvexp.methods.reuse.agentkvshift import AgentKVShift
from kvexp.methods.reuse.encode import begun
from kvexp.methods.reuse.forward import Run, Work
from kvexp.methods.reuse.geometry import Geometry
from kvexp.methods.reuse.probes import residual
from kvexp.methods.reuse.units import Encoder
from kvexp.prompt import Context
from kvexp.stats.residuals import ROUNDING, RemovedSums, ResidualSums

PARTS = ("keys", "turned_keys", "values")
"""Keys before rotation, keys after it, values."""
ESTIMATORS = ("agentkvshift", "top_unweighted", "random_unweighted", "oracle")
ROUNDING_16_BIT = 1e-3


def fresh_rows(method: AgentKVShift, model: Any, context: Context) -> list[Pair]:
    """Return each layer of a context under full recompute, pairs of [1, H, C, D]."""
    with torch.no_grad(), method.attach(model):
        return Run(model, _geometry(model, context), []).full()


class ResidualMeter:
    """Residuals of units that are stored as `method` says; called with contexts, one after the other.

    sums: for each layer the `ResidualSums` of each of PARTS. removed: for each layer what each of ESTIMATORS
    removes of keys and of values. tokens, held_out: tokens of units so far, and how many of them each
    estimator left out.
    """

    def __init__(self, model: Any, method: AgentKVShift) -> None:
        if method.needs_query:
            raise UserError(
                "residuals are looked at without a question, so method.probes=query has nothing to read: use"
                " method.probes=divergence"
            )
        self.model, self.method = model, method
        self.store = method.opened(model)
        layers = range(int(model.config.get_text_config().num_hidden_layers))
        rounding = ROUNDING if model.dtype.itemsize >= 4 else ROUNDING_16_BIT
        self.sums = [{part: ResidualSums(rounding) for part in PARTS} for _ in layers]
        self.removed = [
            {name: {part: RemovedSums() for part in ("keys", "values")} for name in ESTIMATORS}
            for _ in layers
        ]
        self.tokens, self.held_out = 0, dict.fromkeys(ESTIMATORS, 0)

    def __call__(self, context: Context, fresh: list[Pair] | None = None) -> None:
        """Measure one context; `fresh` are its `fresh_rows`, where they are known already."""
        fresh = fresh_rows(self.method, self.model, context) if fresh is None else fresh
        with torch.no_grad(), self.method.attach(self.model):
            encoder, geometry = Encoder(self.model, self.store), _geometry(self.model, context)
            stored = begun(self.method, encoder, geometry)
            self.tokens += int(stored.reusable.sum())
            for layer in range(stored.layers):
                self._measure(stored, layer, fresh[layer])
            for name, method in _estimators(self.method).items():
                run = _Watched(self.model, geometry, method.pieces(encoder, geometry))
                method.repair(run)
                held = stored.reusable & ~run.recomputed()
                self._judge(name, held, stored, fresh, run)
                if name == "random_unweighted":
                    self._judge("oracle", held, stored, fresh, None)

    def _measure(self, stored: Run, layer: int, fresh: Pair) -> None:
        placed, angles = stored.sheet.layer(layer), stored.sheet.angles(layer)
        keys, values = (residual(new, old)[0] for new, old in zip(fresh, placed, strict=True))
        turned_back = keys if angles is None else angles.unsqueeze(1).back(keys[None])[0]
        of_parts = {"keys": (turned_back, 0), "turned_keys": (keys, 0), "values": (values, 1)}
        for unit in stored.geometry.units:
            for name, (x, part) in of_parts.items():
                self.sums[layer][name].add(x[:, unit.columns], fresh[part][0, :, unit.columns])

    def _judge(self, name: str, held: torch.Tensor, stored: Run, fresh: list[Pair], run: Run | None) -> None:
        """Compare held-out tokens under a repair with the stored ones; without a run, under the oracle."""
        self.held_out[name] += int(held.sum())
        for layer in range(stored.layers):
            placed = stored.sheet.layer(layer)
            for place, part in enumerate(("keys", "values")):
                new = fresh[layer][place]
                before = residual(new, placed[place])
                if run is None:
                    after = _centred(before, stored, layer, part == "keys")
                else:
                    after = residual(new, run.sheet.layer(layer)[place])
                chosen = held[0].to(before.device)
                self.removed[layer][name][part].add(before[0, :, chosen], after[0, :, chosen])


def _centred(residuals: torch.Tensor, stored: Run, layer: int, turns: bool) -> torch.Tensor:
    """Residuals [1, H, C, D] without the mean of each unit, which for keys is that before rotation."""
    angles = stored.sheet.angles(layer) if turns else None
    left = residuals.clone() if angles is None else angles.unsqueeze(1).back(residuals)
    for unit in stored.geometry.units:
        rows = left[:, :, unit.columns]
        rows -= rows.mean(2, keepdim=True)
    return left  # turned back or not, lengths are the same


def _estimators(method: AgentKVShift) -> dict[str, AgentKVShift]:
    return {
        "agentkvshift": method,
        "top_unweighted": replace(method, weights="none"),
        "random_unweighted": replace(method, weights="none", probes="random"),
    }


class _Watched(Run):
    """A run that knows which rows it took through its layers in the end."""

    work: Work | None = None

    def start(self, chosen: torch.Tensor) -> Work:
        """See `Run.start`."""
        self.work = super().start(chosen)
        return self.work

    def recomputed(self) -> torch.Tensor:
        """Return which columns were taken through the last layer, [B, C] bool."""
        found = torch.zeros_like(self.geometry.real)
        if self.work is not None:
            rows = self.work.rows
            found.scatter_(1, rows.columns, rows.valid)
        return found


def _geometry(model: Any, context: Context) -> Geometry:
    return Geometry.of([context], [], model.get_input_embeddings().weight.device)
