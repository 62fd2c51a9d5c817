"""Two-level lookup on a GPU, in place: one program for each cell that a query probes, for all codebooks.

Meant for decoding, where each query reads its own cells. Many queries that probe most cells between them are
faster in flat lookup, which reads each key once for many queries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvexp_kernels.backend import power
from kvexp_kernels.lookup.cells import Cells
from kvexp_kernels.lookup.triton import Found, best

MOST_CELLS = 1024  # whose scores one program holds


def lookup_two_level(x: Tensor, cells: Cells, probe: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the best key among those of the `probe` best cells, as the plain form does."""
    index, score, scored = scan_cells(x, cells, probe)
    return *best(index, score), scored.sum()


def scan_cells(x: Tensor, cells: Cells, probe: int) -> tuple[*Found, Tensor]:
    """Return the best key of each query in each cell that it probes, and the number of keys scored [C, n].

    A query that probes fewer cells than `probe`, since others are empty, has index 2^63 - 1 and score -inf.
    Raises ValueError for more than 1,024 cells.
    """
    books, count, width = x.shape
    most = cells.centres.shape[1]
    if most > MOST_CELLS:
        raise ValueError(f"{most} cells are more than the {MOST_CELLS} that a program holds: build fewer")
    probe = min(probe, most)
    x = x.contiguous()
    held = Cells(*(t.contiguous() for t in cells.tensors()))
    chosen = torch.empty(books, count, probe, dtype=torch.int32, device=x.device)
    scored = torch.empty(books, count, dtype=torch.int64, device=x.device)
    index = torch.empty(books, count, probe, dtype=torch.int64, device=x.device)
    score = torch.empty(books, count, probe, dtype=torch.float32, device=x.device)
    if chosen.numel():
        wide = power(most)
        _choose[(count, books)](
            x, held.centres, held.offsets, chosen, scored, count, most, probe,
            D=width, CELLS=wide, WIDE=min(power(width), max(16, 8192 // wide)), num_warps=4,
        )  # fmt: skip
        _scan_cell[(count * probe, books)](
            x, held.keys, held.entries, held.offsets, chosen, index, score,
            count, most, probe, held.keys.shape[1],
            D=width, WIDE=power(width), BLOCK=max(16, min(64, 8192 // power(width))), num_warps=4,
        )  # fmt: skip
    return index, score, scored


@triton.jit
def _choose(
    x, centres, offsets, chosen, scored, count, most, probe,
    D: tl.constexpr, CELLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    query, book = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = book * count + query
    cell = tl.arange(0, CELLS)
    real = cell < most
    start = tl.load(offsets + book * (most + 1) + cell, real, 0)
    size = tl.load(offsets + book * (most + 1) + cell + 1, real, 0) - start
    real = real & (size > 0)
    scores = tl.zeros([CELLS], tl.float32)
    own = centres + (book * most + cell)[:, None] * D
    for begin in range(0, D, WIDE):
        d = begin + tl.arange(0, WIDE)
        asked = tl.load(x + row * D + d, d < D, 0.0).to(tl.float32)
        centre = tl.load(own + d[None, :], real[:, None] & (d < D)[None, :], 0.0).to(tl.float32)
        scores += tl.sum(centre * asked[None, :], 1)
    scores = tl.where(scores == scores, scores, -3e38)  # not a number: some cell, not one out of bounds
    scores = tl.where(real, scores, float("-inf"))
    total = tl.sum(real.to(tl.int64), 0)
    for place in range(probe):
        high, found = tl.max(scores, 0, return_indices=True)
        some = high > float("-inf")
        tl.store(chosen + row * probe + place, tl.where(some, found, -1))
        total += tl.where(some, tl.sum(tl.where(cell == found, size, 0), 0), 0)
        scores = tl.where(cell == found, float("-inf"), scores)
    tl.store(scored + row, total)


@triton.jit
def _scan_cell(
    x, keys, entries, offsets, chosen, index, score, count, most, probe, held,
    D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, book = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = book * count + program // probe
    of = book * count * probe + program
    cell = tl.load(chosen + of)
    some = cell >= 0
    edge = offsets + book * (most + 1) + tl.maximum(cell, 0)
    first = tl.load(edge)
    last = tl.where(some, tl.load(edge + 1), first)
    d = tl.arange(0, WIDE)
    asked = tl.load(x + row * D + d, d < D, 0.0).to(tl.float32)
    top = float("-inf")
    found = first
    for at in range(first, last, BLOCK):
        line = at + tl.arange(0, BLOCK)
        real = line < last
        inside = real[:, None] & (d < D)[None, :]
        key = tl.load(keys + (book * held + line)[:, None] * D + d[None, :], inside, 0.0).to(tl.float32)
        scores = tl.where(real, tl.sum(key * asked[None, :], 1), float("-inf"))
        high, place = tl.max(scores, 0, return_indices=True)
        found = tl.where(high > top, at + place, found)
        top = tl.where(high > top, high, top)
    entry = tl.load(entries + book * held + found, some, 0)
    tl.store(index + of, tl.where(some, entry, 0x7FFFFFFFFFFFFFFF))
    tl.store(score + of, top)
