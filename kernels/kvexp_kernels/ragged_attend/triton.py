"""Ragged attention on a GPU: rows are cut into parts of one length, and the parts' states are merged.

A part that begins behind the last row of its head ends at once, so that heads of different lengths cost what
they hold. All queries of a head share each row that is read.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvexp_kernels.backend import dot_precision, parts_for, power, rows_of_a_tile
from kvexp_kernels.merge_states.triton import merge_many
from kvexp_kernels.ragged_attend.reference import fold, unfold
from kvexp_kernels.tiles import absorb, closed


def ragged_attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    longest: int | None = None,
    parts: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend head by head, as the reference does; `parts` fixes into how many a head is cut."""
    stored, heads = starts.shape
    folded = fold(query, stored, heads).contiguous()
    programs, count, width = folded.shape
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        keys, values = keys.contiguous(), values.contiguous()
    wide, wide_v = power(width), power(values.shape[-1])
    block = rows_of_a_tile(max(width, values.shape[-1]), query.dtype)
    rows_m = min(64, power(count))
    groups = triton.cdiv(count, rows_m)
    longest = keys.shape[0] if longest is None else longest
    parts = parts_for(longest, programs * groups, block, query.device) if parts is None else parts
    states = query.new_empty(
        (parts, programs, count, values.shape[-1]), dtype=query.dtype if parts == 1 else torch.float32
    )
    masses = query.new_empty((parts, programs, count), dtype=torch.float32)
    if states.numel():
        _attend[(programs, groups, parts)](
            folded,
            keys,
            values,
            starts.contiguous(),
            lengths.contiguous(),
            states,
            masses,
            scale * math.log2(math.e),
            count,
            triton.cdiv(triton.cdiv(max(1, longest), parts), block) * block,
            keys.stride(0),
            values.stride(0),
            D=width,
            DV=values.shape[-1],
            WIDE=wide,
            WIDE_V=wide_v,
            ROWS=rows_m,
            BLOCK=block,
            PRECISION=dot_precision(query.dtype),
            num_warps=4,
            num_stages=2,
        )
    a, s = (states[0], masses[0]) if parts == 1 else merge_many(states, masses, query.dtype)
    return unfold(a, query, stored), unfold(s, query, stored)


@triton.jit
def _attend(
    query, keys, values, starts, lengths, states, masses, scale, count, chunk, key_row, value_row,
    D: tl.constexpr, DV: tl.constexpr, WIDE: tl.constexpr, WIDE_V: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, d, e = group * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, WIDE_V)
    of = head.to(tl.int64) * count + m
    asked = tl.load(query + of[:, None] * D + d[None, :], (m < count)[:, None] & (d < D)[None, :], 0.0)
    start, length = tl.load(starts + head), tl.load(lengths + head)
    first = part.to(tl.int64) * chunk
    last = tl.minimum(first + chunk, length)
    acc = tl.zeros([ROWS, WIDE_V], tl.float32)
    high = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    for at in range(first, last, BLOCK):
        row = at + tl.arange(0, BLOCK)
        real = row < last
        row = start + row
        key = tl.load(keys + row[None, :] * key_row + d[:, None], real[None, :] & (d < D)[:, None], 0.0)
        scores = tl.dot(asked, key.to(asked.dtype), input_precision=PRECISION) * scale
        scores = tl.where(real[None, :], scores, float("-inf"))
        inside = real[:, None] & (e < DV)[None, :]
        value = tl.load(values + row[:, None] * value_row + e[None, :], inside, 0.0)
        acc, high, mass = absorb(acc, high, mass, scores, value.to(asked.dtype), PRECISION)
    a, s = closed(acc, high, mass)
    of = (part.to(tl.int64) * tl.num_programs(0) + head) * count + m
    at_out = of[:, None] * DV + e[None, :]
    tl.store(states + at_out, a.to(states.dtype.element_ty), (m < count)[:, None] & (e < DV)[None, :])
    tl.store(masses + of, s, m < count)
