"""How narrowly queries and keys gather around a mean before RoPE, and what their means foretell.

R = |E q_f| / E|q_f| is defined for a band, and a head has many bands. Four numbers for a head are possible,
and differ by a lot: R of its `dominant` band, the mean R of its `top2` bands, the mean over bands `weighted`
by what a band contributes to logits, and the `plain` mean. Contributions are C_f = E|q_f| E|k_f|.

Source: Mao et al., "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression" (2026, arXiv
2604.04921). Numbers of a head that do not rotate have no part in R and C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvexp.attention.bands import Bands, bands
from kvexp.attention.function import Call
from kvexp.methods.eviction.listen import ListeningLayer, listen, rows
from kvexp.stats.moments import NAMES, Moments, MomentSums

BARS = (0.90, 0.95)


@dataclass(frozen=True)
class LayerBands:
    """Moments of a layer's queries [Hq, F], and of the keys [Hq, F] that each query head reads."""

    bands: Bands
    queries: Moments
    keys: Moments

    @property
    def contributions(self) -> torch.Tensor:
        """C_f of each query head, [Hq, F]."""
        return self.queries.magnitude * self.keys.magnitude

    @property
    def dominant(self) -> torch.Tensor:
        """The band with the largest C_f of each query head, [Hq]."""
        return self.contributions.argmax(-1)

    def concentrations(self) -> dict[str, torch.Tensor]:
        """Return the four R of each query head, [Hq], by the names above, and `keys`: R of its keys in its
        dominant band."""
        shares, ratio = self.contributions, self.queries.concentration
        top = shares.topk(min(2, shares.shape[-1]), dim=-1).indices
        return {
            "dominant": ratio.gather(-1, top[:, :1])[:, 0],
            "top2": ratio.gather(-1, top).mean(-1),
            "weighted": (ratio * shares).sum(-1) / shares.sum(-1),
            "plain": ratio.mean(-1),
            "keys": self.keys.concentration.gather(-1, top[:, :1])[:, 0],
        }

    def top2_share(self) -> torch.Tensor:
        """Return the share of the two largest C_f in their sum, [Hq]."""
        shares = self.contributions
        return shares.topk(min(2, shares.shape[-1]), dim=-1).values.sum(-1) / shares.sum(-1)

    def curve(self, distances: torch.Tensor) -> torch.Tensor:
        """Return the logits [Hq, n] (no 1/sqrt(D)) of the mean query over the mean key at distances [n]."""
        product = self.queries.mean * self.keys.mean.conj()
        turned = self.bands.scaling**2 * (product[:, None] * self.bands.phases(distances)).real.sum(-1)
        return turned + (self.queries.still_mean * self.keys.still_mean).sum(-1, keepdim=True)


class BandMeter:
    """Moments of queries and keys of full-attention layers that rotate; called with segments of a text."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._bands: dict[int, Bands] = {}
        self._queries: dict[int, MomentSums] = {}
        self._keys: dict[int, MomentSums] = {}
        self._group: dict[int, int] = {}

    def __call__(self, segments: Sequence[Sequence[int]]) -> None:
        """Measure a batch of segments, each on its own."""
        listen(self.model, segments, self.hear)

    def hear(self, layer: ListeningLayer, call: Call) -> None:
        """Count the queries and keys of the real tokens of a call."""
        index, real = call.layer_index, layer.real(call)
        if index not in self._bands:
            self._bands[index] = bands(self.model, index)
        found = self._bands[index]
        if not found.count:
            return
        assert call.query_pre is not None
        self._queries.setdefault(index, MomentSums()).add(*found.tapped(rows(call.query_pre, real)))
        keys = call.key[:, :, -call.query.shape[2] :]
        turning, still = found.turned_back(keys, layer.q_positions[:, None])
        self._keys.setdefault(index, MomentSums()).add(rows(turning, real), rows(still, real))
        self._group[index] = call.query.shape[1] // call.key.shape[1]

    def layers(self) -> dict[int, LayerBands]:
        """Return what was measured, by layer."""
        found = {}
        for index, sums in sorted(self._queries.items()):
            keys, group = self._keys[index].moments(), self._group[index]
            spread = Moments(*(getattr(keys, name).repeat_interleave(group, 0) for name in NAMES))
            found[index] = LayerBands(self._bands[index], sums.moments(), spread)
        return found


def dominant_points(
    model: Any, layers: dict[int, LayerBands], index: int, head: int, text: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Return the dominant band of a query head over a text, as complex numbers [T].

    Names: `queries` and `keys` before RoPE, `turned_queries` and `turned_keys` after it.
    """
    layer, band = layers[index], int(layers[index].dominant[head])
    found: dict[str, list[torch.Tensor]] = {}

    def hear(listener: ListeningLayer, call: Call) -> None:
        if call.layer_index != index:
            return
        assert call.query_pre is not None
        keys = call.key[:, :, -call.query.shape[2] :]
        kv = head * keys.shape[1] // call.query.shape[1]
        pairs = {
            "queries": layer.bands.tapped(call.query_pre)[0][0, head],
            "keys": layer.bands.turned_back(keys, listener.q_positions[:, None])[0][0, kv],
            "turned_queries": layer.bands.rotated(call.query)[0][0, head],
            "turned_keys": layer.bands.rotated(keys)[0][0, kv],
        }
        for name, points in pairs.items():
            found.setdefault(name, []).append(points[:, band])

    listen(model, [text], hear)
    return {name: torch.cat(points) for name, points in found.items()}


def summary(values: torch.Tensor, bars: Sequence[float] = BARS) -> dict[str, float]:
    """Return mean and median of `values`, and the share of them above each bar."""
    flat = values.flatten().double()
    above = {f"above_{bar:.2f}": float((flat > bar).double().mean()) for bar in bars}
    return {"mean": float(flat.mean()), "median": float(flat.median()), **above}
