"""The most bytes that an evicting cache holds, found without weighing all of it at every step."""

from __future__ import annotations

from collections.abc import Sequence

from kvexp.cache.dense import DenseLayer
from kvexp.cache.evicting import EvictingLayer
from kvexp.cache.kv_cache import tensor_bytes

POSITION = 9  # bytes of a slot, a position and a mark that a row counts


class Scale:
    """Weighs the layers of a cache when it may hold most, in bytes for each sequence.

    Rows leave one layer after another, and between that a cache only grows: it is fullest right before rows
    leave a layer, or at the end of a forward. Before rows leave, only layers that changed since the last time
    in the same forward are weighed; at the end of a forward, nothing is where all that it can have grown by
    since would make no new peak.
    """

    def __init__(self, layers: Sequence[DenseLayer]) -> None:
        self.layers = layers
        self._bytes: list[float] = []  # of each layer, in a forward in which rows leave
        self._changed = 0  # this layer and those behind it may have grown since
        self._bound = float("inf")  # no fewer bytes than the cache holds
        self._row = 0.0  # what a token can add at most

    def start(self, tokens: int) -> None:
        """A forward brings `tokens` to every layer."""
        self._bytes = []
        self._bound += tokens * self._row

    def before(self, index: int) -> float:
        """Return the bytes held before rows leave layer `index` of the cache."""
        if self._bytes:
            self._again(index + 1)
        else:
            self._bytes = [weight(layer) for layer in self.layers]
        return sum(self._bytes)

    def after(self, index: int) -> None:
        """Rows have left layer `index`."""
        self._bytes[index] = weight(self.layers[index])
        self._changed = index + 1

    def end(self, peak: float, settled: bool) -> float | None:
        """Return the bytes held at the end of a forward, or None where they cannot exceed `peak`.

        Until the method is `settled`, it may note more than it does now.
        """
        if self._bytes:
            self._again(len(self.layers))
        elif self._bound <= peak:
            return None
        else:
            self._bytes = [weight(layer) for layer in self.layers]
        total = sum(self._bytes)
        self._bound = total if settled else float("inf")
        self._row, self._changed = sum(map(_row, self.layers)), 0
        return total

    def _again(self, end: int) -> None:
        for index in range(self._changed, end):
            self._bytes[index] = weight(self.layers[index])


def weight(layer: DenseLayer) -> float:
    """Return the bytes of a layer for each sequence: what a batch holds apart is divided by it."""
    return sum(sum(map(tensor_bytes, tensors)) / batch for batch, tensors in layer.tensors_by_batch())


def _row(layer: DenseLayer) -> float:
    """Return the most bytes that one more token of a sequence adds to a layer."""
    if not layer.is_initialized:
        return float("inf")
    heads = layer.keys.shape[1]
    size = heads * (layer.keys.shape[3] + layer.values.shape[3]) * layer.keys.element_size()
    if isinstance(layer, EvictingLayer):
        size += heads * (POSITION + sum(track.element_size() for track in layer.tracks.values()))
        if layer.queries is not None:
            queries = layer.queries.queries
            size += queries.shape[1] * queries.shape[3] * queries.element_size() + POSITION
    return size
