"""Merge attention states on a GPU: one pass over the outputs, no temporary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvexp_kernels.backend import power
from kvexp_kernels.tiles import merged

TILE = 4096  # numbers of one output that a program holds


def merge_states(a1: Tensor, s1: Tensor, a2: Tensor, s2: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two states of the same queries, as the reference does; not for float64."""
    rows = torch.broadcast_shapes(a1.shape[:-1], s1.shape, a2.shape[:-1], s2.shape)
    width = a1.shape[-1]
    out = a1.new_empty((*rows, width), dtype=torch.promote_types(a1.dtype, a2.dtype))
    total = a1.new_empty(rows, dtype=torch.float32)
    if not total.numel():
        return out, total
    sides = [_rows(x, rows, x is a1 or x is a2) for x in (a1, s1, a2, s2)]
    shape = sides[0].shape
    wide = power(width)
    block = max(1, TILE // wide)
    _merge_two[(triton.cdiv(total.numel(), block),)](
        *sides,
        out,
        total,
        total.numel(),
        shape[1],
        shape[2],
        *(stride for x in sides for stride in x.stride()[:3]),
        *(x.stride(3) for x in (sides[0], sides[2])),
        WIDTH=width,
        WIDE=wide,
        BLOCK=block,
    )
    return out, total


def merge_many(a: Tensor, s: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Merge N states `a [N, ..., Dv]`, `s [N, ...]`; `dtype` is that of the output (default: that of `a`)."""
    a, s = a.contiguous(), s.contiguous()
    out = a.new_empty(a.shape[1:], dtype=dtype or a.dtype)
    total = s.new_empty(s.shape[1:], dtype=torch.float32)
    rows = total.numel()
    if out.numel():
        wide = power(a.shape[-1])
        block = max(1, 1024 // wide)
        grid = (triton.cdiv(rows, block),)
        _merge_parts[grid](a, s, out, total, a.shape[0], rows, WIDTH=a.shape[-1], WIDE=wide, BLOCK=block)
    return out, total


def _rows(x: Tensor, rows: torch.Size, output: bool) -> Tensor:
    """Broadcast to the rows, as three axes of them; an output has its numbers behind them."""
    x = x.expand(*rows, x.shape[-1]) if output else x.expand(rows)
    lead = len(rows)
    if lead > 3:
        return x.flatten(0, lead - 3)
    return x[(None,) * (3 - lead)]


@triton.jit
def _merge_two(
    a1, s1, a2, s2, out, total, rows, n1, n2,
    a1_0, a1_1, a1_2, s1_0, s1_1, s1_2, a2_0, a2_1, a2_2, s2_0, s2_1, s2_2, a1_d, a2_d,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, WIDE)
    real = row < rows
    mask = real[:, None] & (d < WIDTH)[None, :]
    i, j, k = (row // n2 // n1).to(tl.int64), (row // n2 % n1).to(tl.int64), (row % n2).to(tl.int64)
    mass1 = tl.load(s1 + i * s1_0 + j * s1_1 + k * s1_2, real, 0.0).to(tl.float32)
    mass2 = tl.load(s2 + i * s2_0 + j * s2_1 + k * s2_2, real, 0.0).to(tl.float32)
    at1 = (i * a1_0 + j * a1_1 + k * a1_2)[:, None] + (d * a1_d)[None, :]
    at2 = (i * a2_0 + j * a2_1 + k * a2_2)[:, None] + (d * a2_d)[None, :]
    one = tl.load(a1 + at1, mask, 0.0).to(tl.float32)
    two = tl.load(a2 + at2, mask, 0.0).to(tl.float32)
    a, s = merged(one, mass1, two, mass2)
    tl.store(out + row.to(tl.int64)[:, None] * WIDTH + d[None, :], a.to(out.dtype.element_ty), mask)
    tl.store(total + row, s, real)


@triton.jit
def _merge_parts(a, s, out, total, parts, rows, WIDTH: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, WIDE)
    real = row < rows
    mask = real[:, None] & (d < WIDTH)[None, :]
    mass = tl.full([BLOCK], float("-inf"), tl.float32)
    mean = tl.zeros([BLOCK, WIDE], tl.float32)
    of, at = row, row[:, None] * WIDTH + d[None, :]
    for _ in range(parts):
        one = tl.load(a + at, mask, 0.0).to(tl.float32)
        two = tl.load(s + of, real, float("-inf")).to(tl.float32)
        mean, mass = merged(mean, mass, one, two)
        of += rows
        at += rows * WIDTH
    tl.store(out + row[:, None] * WIDTH + d[None, :], mean.to(out.dtype.element_ty), mask)
    tl.store(total + row, mass, real)
