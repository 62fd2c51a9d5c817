"""Encode units of text once, behind the prefix that a method wants, and find them in the store again.

A unit is always run on its own (in an earlier context: with that context alone), so that its rows depend on
its prefix and its ids and not on what else was missing from the store.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import torch

from kvexp.attention.devices import compute_device
from kvexp.attention.families import layer_windows
from kvexp.attention.options import options_of
from kvexp.cache.chunk_store import Chunk, ChunkStore
from kvexp.cache.kv_cache import KVCache, prefill
from kvexp.methods.reuse.geometry import Geometry
from kvexp.methods.reuse.report import Report
from kvexp.methods.reuse.sheet import Piece, RecordingLayer, filled
from kvexp.prompt import Context

Ids = Sequence[int]


class Encoder:
    """Gives chunks, from the store where it holds them; needs an attached model.

    What it counts are chunks of units that it gives to be placed, whatever was looked up for them: headers,
    and chunks of an earlier context that have to be encoded once more with the others, count as no hits.
    """

    def __init__(self, model: Any, store: ChunkStore) -> None:
        store.check(model)
        self.model, self.store = model, store
        self.seconds = 0.0
        self.hits = self.misses = self.found = 0

    def header(self, ids: Ids) -> Chunk:
        """Return the chunk of an exact prefix, which is stored exactly."""
        return self._get((), ids, exact=True)[0]

    def alone(self, unit: Ids) -> Chunk:
        """Return the chunk of a unit that stands behind nothing, at position 0."""
        return self._unit((), unit)

    def behind(self, header: Ids, unit: Ids) -> Chunk:
        """Return the chunk of a unit that was encoded right behind `header`."""
        return self._unit(header, unit)

    def together(self, header: Ids, units: Sequence[Ids]) -> list[Chunk]:
        """Return the chunks of units that were encoded one after the other behind `header`."""
        prefixes = [[*header, *(token for unit in units[:i] for token in unit)] for i in range(len(units))]
        found = [self.store.get(prefix, unit) for prefix, unit in zip(prefixes, units, strict=True)]
        if all(chunk is not None for chunk in found):
            for unit in units:
                self.count(len(unit), True)
            return [chunk for chunk in found if chunk is not None]
        rows = self._rows(header, [token for unit in units for token in unit])
        made, at = [], 0
        for prefix, unit in zip(prefixes, units, strict=True):
            part = [(k[:, at : at + len(unit)], v[:, at : at + len(unit)]) for k, v in rows]
            made.append(Chunk.of(len(prefix), part, self.store.codec))
            self.store.put(prefix, unit, made[-1])
            self.count(len(unit), False)
            at += len(unit)
        return made

    def count(self, tokens: int, found: bool) -> None:
        """Count a chunk of a unit that is placed, and whether the store held it."""
        self.hits, self.misses = self.hits + found, self.misses + (not found)
        self.found += tokens if found else 0

    def report(self, report: Report) -> None:
        """Note which chunks this encoder gave."""
        report.hits, report.misses, report.found = self.hits, self.misses, self.found
        report.store_seconds = self.seconds

    def _unit(self, prefix: Ids, unit: Ids) -> Chunk:
        chunk, found = self._get(prefix, unit)
        self.count(len(unit), found)
        return chunk

    def _get(self, prefix: Ids, unit: Ids, exact: bool = False) -> tuple[Chunk, bool]:
        """Return a chunk, and whether the store held it."""
        found = self.store.get(prefix, unit, exact)
        if found is not None:
            return found, True
        made = Chunk.of(len(prefix), self._rows(prefix, unit), self.store.codec_for(exact))
        self.store.put(prefix, unit, made, exact)
        return made, False

    def _rows(self, prefix: Ids, ids: Ids) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Run `ids` behind `prefix`; return each layer's keys and values [H, n, D] of `ids` alone."""
        before = self.header(prefix) if prefix else None
        config = self.model.config.get_text_config()
        backend = options_of(self.model).backend
        layers: list[Any] = []
        for index, window in enumerate(layer_windows(config)):
            if before is None:
                layers.append(RecordingLayer(window=window, backend=backend))
                continue
            device = compute_device(self.model.base_model.layers[index])
            keys, values = (x.to(device)[None] for x in before.rows(index))
            positions = torch.arange(len(prefix))[None]
            layers.append(filled(keys, values, positions, window, backend, len(prefix), RecordingLayer))
        since = time.perf_counter()
        prefill(self.model, list(ids), KVCache(layers))
        self.seconds += time.perf_counter() - since
        return [(layer.keys[0, :, len(prefix) :], layer.values[0, :, len(prefix) :]) for layer in layers]


def pieces(encoder: Encoder, geometry: Geometry, encoded: str, group: int) -> list[Piece]:
    """Return where every header and every unit of a batch is placed.

    `encoded` says where units were encoded: `behind_header`, `alone`, or in an `old_context`, which holds
    `group` units (`earlier`).
    """
    found = []
    for b, context in enumerate(geometry.contexts):
        if context.header:
            found.append(Piece(encoder.header(context.header), b, geometry.first(b)))
        chunks = _chunks(encoder, context, encoded, group)
        for unit in geometry.units:
            if unit.sequence == b:
                found.append(Piece(chunks[unit.at], b, unit.start))
    return found


def _chunks(encoder: Encoder, context: Context, encoded: str, group: int) -> dict[int, Chunk]:
    numbers = [i for i, chunk in enumerate(context.chunks) if chunk]
    if encoded == "alone":
        return {i: encoder.alone(context.chunks[i]) for i in numbers}
    if encoded == "behind_header":
        return {i: encoder.behind(context.header, context.chunks[i]) for i in numbers}
    chunks: dict[int, Chunk] = {}
    for members in earlier(context, group):
        made = encoder.together(context.header, [context.chunks[i] for i in members])
        chunks |= zip(members, made, strict=True)
    return chunks


def earlier(context: Context, group: int) -> list[list[int]]:
    """Return the units of a context as earlier prompts held them: indices of chunks, `group` to a prompt.

    The order is that of a hash of their ids: another order than now, and the same whatever it is now.
    """

    def drawn(index: int) -> tuple[str, int]:
        text = ",".join(map(str, context.chunks[index]))
        return hashlib.sha256(text.encode()).hexdigest(), index

    order = sorted((i for i, chunk in enumerate(context.chunks) if chunk), key=drawn)
    return [order[at : at + group] for at in range(0, len(order), group)]
