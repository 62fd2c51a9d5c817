"""Lookup and merge on a GPU in two launches: scan the keys, then choose, fetch and merge.

The second program of a query compares the parts of the scan, reads the state of the winner and merges it with
the local one in registers: index and fetched state never travel through memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvexp_kernels.backend import power
from kvexp_kernels.lookup.triton import scan, winner
from kvexp_kernels.lookup.triton_cells import scan_cells
from kvexp_kernels.lookup_merge.reference import Entries
from kvexp_kernels.tiles import merged


def lookup_merge(
    x: Tensor, entries: Entries, local_a: Tensor, local_s: Tensor, parts: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Look up and merge, as the reference does; `parts` fixes into how many keys are cut."""
    if entries.cells is None:
        index, score = scan(x, entries.keys, entries.key_scale, parts)
    else:
        index, score, _ = scan_cells(x, entries.cells, entries.probe)
    books, count, heads, width = local_a.shape
    out = torch.empty_like(local_a, memory_format=torch.contiguous_format)
    total = local_s.new_empty((books, count, heads), dtype=torch.float32)
    found = index.new_empty(books, count)
    if found.numel():
        _fetch[(count, books)](
            index,
            score,
            entries.a.contiguous(),
            entries.a_scale if entries.a_scale is None else entries.a_scale.contiguous(),
            entries.log_z.contiguous(),
            local_a,
            local_s,
            out,
            total,
            found,
            count,
            index.shape[2],
            entries.a.shape[1],
            *local_a.stride(),
            *local_s.stride(),
            H=heads,
            D=width,
            HEADS=power(heads, 1),
            WIDE=power(width),
            PARTS=power(index.shape[2], 2),
        )
    return out, total, found


@triton.jit
def _fetch(
    index, score, a, a_scale, log_z, local_a, local_s, out, total, found, count, parts, held,
    la_c, la_n, la_h, la_d, ls_c, ls_n, ls_h,
    H: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    query, book = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = book * count + query
    one = tl.arange(0, 1)
    numbers, _ = winner(index, score, row + one, one == 0, parts, PARTS)
    number = tl.sum(numbers, 0)  # of one
    tl.store(found + row, number)
    h, d = tl.arange(0, HEADS), tl.arange(0, WIDE)
    real = h < H
    inside = real[:, None] & (d < D)[None, :]
    of = (book * held + number) * H + h
    state = tl.load(a + of[:, None] * D + d[None, :], inside, 0.0).to(tl.float32)
    if a_scale is not None:
        state *= tl.load(a_scale + of, real, 0.0).to(tl.float32)[:, None]
    mass = tl.load(log_z + of, real, 0.0).to(tl.float32)
    at = book * la_c + query * la_n + h[:, None] * la_h + d[None, :] * la_d
    local = tl.load(local_a + at, inside, 0.0).to(tl.float32)
    near = tl.load(local_s + book * ls_c + query * ls_n + h * ls_h, real, 0.0).to(tl.float32)
    state, mass = merged(state, mass, local, near)
    to = row * H + h
    tl.store(out + to[:, None] * D + d[None, :], state.to(out.dtype.element_ty), inside)
    tl.store(total + to, mass, real)
