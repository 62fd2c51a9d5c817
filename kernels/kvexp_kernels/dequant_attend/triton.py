"""Attention over quantised rows on a GPU: codes are unpacked in registers, and no row is written in full.

A byte's codes are neighbours along the channels, so a tile of bytes becomes a tile of channels by
interleaving its shifted copies. Keys and values may be grouped along rows or channels, each in its own way.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvexp_kernels.backend import dot_precision, parts_for, power, rows_of_a_tile
from kvexp_kernels.merge_states.triton import merge_many
from kvexp_kernels.quantise import Packed
from kvexp_kernels.ragged_attend.reference import fold, unfold
from kvexp_kernels.tiles import absorb, closed


def dequant_attend(
    query: Tensor,
    keys: Packed,
    values: Packed,
    scale: float,
    visible: Tensor | None = None,
    parts: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to all rows that both hold, as the reference does; `parts` fixes into how many rows are cut."""
    stored, heads = values.codes.shape[:2]
    keys, values = (x.each(lambda t: t if t.stride(-1) == 1 else t.contiguous()) for x in (keys, values))
    folded = fold(query, stored, heads).contiguous()
    programs, count, _ = folded.shape
    rows_m = min(64, power(count))
    groups = triton.cdiv(count, rows_m)
    block = min(32, rows_of_a_tile(max(keys.width, values.width), query.dtype))
    if parts is None:
        parts = parts_for(values.rows, programs * groups, block, query.device)
    states = query.new_empty(
        (parts, programs, count, values.width), dtype=query.dtype if parts == 1 else torch.float32
    )
    masses = query.new_empty((parts, programs, count), dtype=torch.float32)
    seen = None if visible is None else visible.expand(stored, heads, values.rows)
    if states.numel():
        _attend[(programs, groups, parts)](
            folded,
            *keys.tensors(),
            *values.tensors(),
            seen,
            states,
            masses,
            scale * math.log2(math.e),
            count,
            heads,
            values.rows,
            triton.cdiv(triton.cdiv(max(1, values.rows), parts), block) * block,
            *(stride for x in (*keys.tensors(), *values.tensors()) for stride in x.stride()[:3]),
            *((0, 0, 0) if seen is None else seen.stride()),
            D=keys.width,
            DV=values.width,
            WIDE=power(keys.width),
            WIDE_V=power(values.width),
            K_BITS=keys.bits,
            V_BITS=values.bits,
            K_GROUP=keys.group,
            V_GROUP=values.group,
            K_ROWS=keys.dim == -2,
            V_ROWS=values.dim == -2,
            ROWS=rows_m,
            BLOCK=block,
            PRECISION=dot_precision(query.dtype),
            num_warps=4,
            num_stages=2,
        )
    a, s = (states[0], masses[0]) if parts == 1 else merge_many(states, masses, query.dtype)
    return unfold(a, query, stored), unfold(s, query, stored)


@triton.jit
def _numbers(
    codes, scale, minimum, row, real, code_row, scale_row, minimum_row,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BY_ROWS: tl.constexpr,
):  # fmt: skip
    """Return rows [S, WIDE] as float32; zero where a row or a channel is none."""
    EACH: tl.constexpr = 8 // BITS
    MASK: tl.constexpr = (1 << BITS) - 1
    byte = tl.arange(0, WIDE // EACH)
    held = real[:, None] & (byte < (WIDTH + EACH - 1) // EACH)[None, :]
    packed = tl.load(codes + row[:, None] * code_row + byte[None, :], held, 0)
    if EACH == 1:
        whole = packed
    elif EACH == 2:
        whole = tl.interleave(packed & MASK, packed >> BITS)
    else:
        even = tl.interleave(packed & MASK, (packed >> (2 * BITS)) & MASK)
        odd = tl.interleave((packed >> BITS) & MASK, packed >> (3 * BITS))
        whole = tl.interleave(even, odd)
    d = tl.arange(0, WIDE)
    inside = real[:, None] & (d < WIDTH)[None, :]
    if BY_ROWS:
        unit = row[:, None] // GROUP
        number = d[None, :]
    else:
        unit = row[:, None]
        number = (d // GROUP)[None, :]
    step = tl.load(scale + unit * scale_row + number, inside, 0.0).to(tl.float32)
    low = tl.load(minimum + unit * minimum_row + number, inside, 0.0).to(tl.float32)
    return whole.to(tl.float32) * step + low


@triton.jit
def _attend(
    query, k_codes, k_scale, k_min, v_codes, v_scale, v_min, seen, states, masses,
    scale, count, heads, rows, chunk,
    kc_b, kc_h, kc_s, ks_b, ks_h, ks_s, km_b, km_h, km_s,
    vc_b, vc_h, vc_s, vs_b, vs_h, vs_s, vm_b, vm_h, vm_s, see_b, see_h, see_s,
    D: tl.constexpr, DV: tl.constexpr, WIDE: tl.constexpr, WIDE_V: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr,
    K_ROWS: tl.constexpr, V_ROWS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = (program // heads).to(tl.int64), (program % heads).to(tl.int64)
    m, d, e = group * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, WIDE_V)
    of = program.to(tl.int64) * count + m
    asked = tl.load(query + of[:, None] * D + d[None, :], (m < count)[:, None] & (d < D)[None, :], 0.0)
    k_codes += b * kc_b + h * kc_h
    k_scale += b * ks_b + h * ks_h
    k_min += b * km_b + h * km_h
    v_codes += b * vc_b + h * vc_h
    v_scale += b * vs_b + h * vs_h
    v_min += b * vm_b + h * vm_h
    first = part.to(tl.int64) * chunk
    last = tl.minimum(first + chunk, rows)
    acc = tl.zeros([ROWS, WIDE_V], tl.float32)
    high = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    for at in range(first, last, BLOCK):
        row = at + tl.arange(0, BLOCK)
        real = row < last
        key = _numbers(k_codes, k_scale, k_min, row, real, kc_s, ks_s, km_s, D, WIDE, K_BITS, K_GROUP, K_ROWS)
        scores = tl.dot(asked, tl.trans(key.to(asked.dtype)), input_precision=PRECISION) * scale
        shown = real
        if seen is not None:
            shown = real & (tl.load(seen + b * see_b + h * see_h + row * see_s, real, 0) != 0)
        scores = tl.where(shown[None, :], scores, float("-inf"))
        value = _numbers(
            v_codes, v_scale, v_min, row, real, vc_s, vs_s, vm_s, DV, WIDE_V, V_BITS, V_GROUP, V_ROWS
        )
        acc, high, mass = absorb(acc, high, mass, scores, value.to(asked.dtype), PRECISION)
    a, s = closed(acc, high, mass)
    of = (part.to(tl.int64) * tl.num_programs(0) + program) * count + m
    tl.store(
        states + of[:, None] * DV + e[None, :],
        a.to(states.dtype.element_ty),
        (m < count)[:, None] & (e < DV)[None, :],
    )
    tl.store(masses + of, s, m < count)
