"""Chunks of random rows for tests of their store."""

from __future__ import annotations

import torch

from kvexp.cache.chunk_store import Chunk, Exact

PREFIX, UNIT = (4, 5), (6, 7, 8, 9)  # what chunk() stands for
SIZE = 2 * 2 * 3 * 4 * 5 * 4  # layers, keys and values, [3, 4, 5] float32


def chunk(seed: int = 0, start: int = 2, dtype: torch.dtype = torch.float32) -> Chunk:
    numbers = torch.Generator().manual_seed(seed)
    layers = [
        (torch.randn(3, 4, 5, generator=numbers).to(dtype), torch.randn(3, 4, 5, generator=numbers).to(dtype))
        for _ in range(2)
    ]
    return Chunk.of(start, layers, Exact())


def same(one: Chunk | None, other: Chunk) -> bool:
    if one is None or (one.start, one.length) != (other.start, other.length):
        return False
    return all(
        torch.equal(a, b) and a.dtype == b.dtype
        for i in range(len(other.layers))
        for a, b in zip(one.rows(i), other.rows(i), strict=True)
    )
