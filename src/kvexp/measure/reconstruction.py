"""How well means that were measured on one text foretell the logits of another, head by head.

For the last queries of a text and the `length` keys before each, true logits q k (no 1/sqrt(D)) are compared
by Pearson's r with five predictions:

    distance       the mean query over the mean key, at every distance
    log_distance   the same at distances 1, 2, 3, ... that grow by a constant factor
    mean_curve     the same, with the true logits averaged over queries at each of these distances
    trig           the mean query over the actual key (S_trig with no offset)
    trig_norm      the same with S_norm added

Source: the reconstruction experiment of Mao et al., "TriAttention: Efficient Long Reasoning with
Trigonometric KV Compression" (2026, arXiv 2604.04921). r is the mean over queries of one r each,
except for `mean_curve`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvexp.attention.bands import wide
from kvexp.attention.function import Call
from kvexp.measure.concentration import LayerBands
from kvexp.methods.eviction import trig
from kvexp.methods.eviction.listen import ListeningLayer, listen
from kvexp.methods.eviction.reconstruction import expected, logits, pearson

NAMES = ("distance", "log_distance", "mean_curve", "trig", "trig_norm")


class ReconstructionMeter:
    """Compares predictions with true logits; called with texts of at least `length + queries` tokens."""

    def __init__(
        self, model: Any, layers: dict[int, LayerBands], length: int = 1536, queries: int = 16
    ) -> None:
        self.model, self.layers, self.length, self.queries = model, layers, length, queries
        self.distances = log_spaced(length)  # of `log_distance` and `mean_curve`, and of `curves`
        self._sums: dict[int, dict[str, torch.Tensor]] = {}
        self._logits: dict[int, torch.Tensor] = {}
        self._count = 0
        self._first = 0

    def __call__(self, text: Sequence[int]) -> None:
        """Compare the last queries of one text."""
        self._first = len(text) - self.queries
        if self._first < self.length:
            raise ValueError(
                f"a text of {len(text)} tokens has no {self.queries} queries behind {self.length}"
            )
        self._count += 1
        listen(self.model, [text], self.hear)

    def hear(self, layer: ListeningLayer, call: Call) -> None:
        """Compare the queries of a call that are among the last."""
        index = call.layer_index
        if index not in self.layers:
            return
        for column, position in enumerate(layer.q_slots.tolist()):
            if position >= self._first:
                self._compare(index, call, column, position)

    def _compare(self, index: int, call: Call, column: int, position: int) -> None:
        found = self.layers[index]
        keys = wide(call.key[:, :, position - self.length : position].flip(2))  # nearest first
        true = logits(call.query[0, :, column], keys)  # [Hq, length]
        curve = found.curve(torch.arange(1, self.length + 1))
        some = self.distances - 1
        foretold = expected(found.queries, found.bands, keys, position)
        norm = trig.norms(keys, found.queries, found.bands, "weighted", call.scale)[0]
        self._add(index, "distance", pearson(curve, true))
        self._add(index, "log_distance", pearson(curve[:, some], true[:, some]))
        self._add(index, "trig", pearson(foretold, true))
        self._add(index, "trig_norm", pearson(foretold + norm, true))
        self._logits[index] = self._logits.get(index, 0.0) + true[:, some]

    def _add(self, index: int, name: str, value: torch.Tensor) -> None:
        sums = self._sums.setdefault(index, {})
        sums[name] = sums.get(name, 0.0) + value

    def curves(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return (predicted, true mean) logits [Hq, n] at `distances`, by layer."""
        total = self._count * self.queries
        return {
            index: (self.layers[index].curve(self.distances), logits / total)
            for index, logits in self._logits.items()
        }

    def correlations(self) -> dict[str, torch.Tensor]:
        """Return r [L, Hq] of each prediction, layers in order."""
        total, found = self._count * self.queries, {}
        for name in NAMES:
            if name == "mean_curve":
                found[name] = torch.stack([pearson(*pair) for _, pair in sorted(self.curves().items())])
            else:
                found[name] = torch.stack([sums[name] / total for _, sums in sorted(self._sums.items())])
        return found


def log_spaced(length: int, n: int = 48) -> torch.Tensor:
    """Return about n whole distances from 1 to `length`, each once, that grow by a constant factor."""
    exponents = torch.linspace(0, 1, n, dtype=torch.float64)
    return (float(length) ** exponents).round().long().unique()
