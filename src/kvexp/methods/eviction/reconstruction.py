"""How well means of queries foretell the logits of queries that they were not measured on, head by head.

The prediction is S_trig with no offset: the mean query, turned to the position of the query, times each key.
It is compared with the true logits (no 1/sqrt(D)) by Pearson's r over the keys before the query.

Source: the reconstruction experiment of Mao et al., "TriAttention: Efficient Long Reasoning with
Trigonometric KV Compression" (2026, arXiv 2604.04921), which compares more predictions
(`kvexp.measure.reconstruction`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvexp.attention.bands import Bands, wide
from kvexp.attention.function import Call
from kvexp.cache.rows import over_heads
from kvexp.methods.eviction import trig
from kvexp.methods.eviction.listen import ListeningLayer
from kvexp.stats.moments import Moments

QUERIES = 16  # of a text that are compared, at equal distances in its second half


class HeldOut:
    """Correlations of S_trig with the true logits of texts; `hear` sees texts one at a time, from `start`."""

    def __init__(self, layers: dict[int, Moments], bands: dict[int, Bands]) -> None:
        self.layers, self.bands = layers, bands
        self._sums: dict[int, torch.Tensor] = {}
        self._counts: dict[int, int] = {}
        self._positions: set[int] = set()

    def start(self, text: Sequence[int]) -> None:
        """A text follows."""
        self._positions = set(sampled(len(text)))

    def hear(self, layer: ListeningLayer, call: Call) -> None:
        """Compare the queries of a call that are among those of the text."""
        index = call.layer_index
        for column, position in enumerate(layer.q_slots.tolist()):
            if position not in self._positions:
                continue
            keys = wide(call.key[:, :, :position])
            foretold = expected(self.layers[index], self.bands[index], keys, position)
            r = pearson(foretold, logits(call.query[0, :, column], keys)).cpu()
            self._sums[index] = self._sums.get(index, torch.zeros_like(r)) + r
            self._counts[index] = self._counts.get(index, 0) + 1

    def correlations(self) -> dict[int, torch.Tensor]:
        """Return the mean r of each query head over queries, [Hq] float64 by layer; {} where none came."""
        return {index: sums / self._counts[index] for index, sums in sorted(self._sums.items())}


def sampled(length: int) -> list[int]:
    """Return the positions of the queries that are compared in a text of `length` tokens.

    Two keys at least stand before each, since r of fewer says nothing.
    """
    half = length // 2
    places = (half + i * (length - half) // QUERIES for i in range(QUERIES))
    return sorted({place for place in places if place >= 2})


def expected(moments: Moments, bands: Bands, keys: torch.Tensor, position: int) -> torch.Tensor:
    """Return S_trig [Hq, S] of cached keys [1, Hk, S, D] for the mean query at `position`."""
    one = torch.ones(bands.count, dtype=torch.complex128)  # no offset: each band as it is
    vectors = trig.centre(moments, bands, one, torch.tensor([position], device=keys.device))
    return trig.against(keys, vectors)[0]


def logits(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the products [Hq, S] of a rotated query [Hq, D] with keys [1, Hk, S, D], in float64."""
    return (over_heads(keys, query.shape[0])[0] @ wide(query)[..., None])[..., 0]


def pearson(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the correlation along the last dimension; 0 where one side does not vary."""
    x, y = x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True)
    sizes = x.square().sum(-1).sqrt() * y.square().sum(-1).sqrt()
    return ((x * y).sum(-1) / sizes).nan_to_num(0.0, 0.0, 0.0)
