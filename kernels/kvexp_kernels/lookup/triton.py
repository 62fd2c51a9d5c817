"""Exact lookup on a GPU: keys are scanned in parts, each kept to one best row, and the parts are compared.

No score is written. Many queries share each key that is read, on tensor cores; products are summed in
float32. Equal scores go to the lower number, within a tile, between tiles and between parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvexp_kernels.backend import dot_precision, parts_for, power

Found = tuple[Tensor, Tensor]  # (index, score), both [C, n, parts]


def lookup_flat(
    x: Tensor, keys: Tensor, scale: Tensor | None = None, parts: int | None = None
) -> tuple[Tensor, Tensor]:
    """Find the best key of each query, as the reference does; `parts` fixes into how many keys are cut."""
    return best(*scan(x, keys, scale, parts))


def scan(x: Tensor, keys: Tensor, scale: Tensor | None, parts: int | None = None) -> Found:
    """Return the best key of each query in each part of the keys."""
    books, count, width = x.shape
    entries = keys.shape[1]
    x, keys = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, keys))
    # Codes of int8 are exact in the dtype of x; other keys meet x in the wider dtype of both.
    work = x.dtype if keys.dtype == torch.int8 else torch.promote_types(x.dtype, keys.dtype)
    narrow = work != torch.float32
    wide = power(width)
    whole = narrow and wide <= 256  # a tile holds queries and keys in full, else some numbers at a time
    rows_m, block = (64, 128 if whole else 64) if narrow and count > 16 else (16, 64 if narrow else 32)
    groups = triton.cdiv(count, rows_m)
    parts = parts_for(entries, books * groups, block, x.device) if parts is None else parts
    index = torch.empty(books, count, parts, dtype=torch.int64, device=x.device)
    score = torch.empty(books, count, parts, dtype=torch.float32, device=x.device)
    if index.numel():
        _scan[(groups, books, parts)](
            x,
            keys,
            scale,
            index,
            score,
            count,
            entries,
            triton.cdiv(triton.cdiv(entries, parts), block) * block,
            *x.stride()[:2],
            *keys.stride()[:2],
            *((0, 0) if scale is None else scale.stride()),
            D=width,
            WIDE=wide if whole else min(wide, 64),
            ROWS=rows_m,
            BLOCK=block,
            KIND=_KINDS[work],
            PRECISION=dot_precision(work),
            num_warps=4,
            num_stages=2 if whole else 3,
        )
    return index, score


def best(index: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best of the parts, `(index, score)` both [C, n]; equal ones go to the lower number."""
    books, count, parts = index.shape
    if parts == 1:
        return index[..., 0], score[..., 0]
    found, top = index.new_empty(books, count), score.new_empty(books, count)
    if found.numel():
        _best[(triton.cdiv(found.numel(), 16),)](
            index, score, found, top, found.numel(), parts, WIDE=power(parts, 2), ROWS=16
        )
    return found, top


_KINDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _scan(
    x, keys, scale, index, score, count, entries, chunk, x_c, x_n, key_c, key_k, scale_c, scale_k,
    D: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    group, book, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    m = group * ROWS + tl.arange(0, ROWS)
    asking = (m < count)[:, None]
    x += book * x_c + m.to(tl.int64)[:, None] * x_n
    keys += book * key_c
    first = part * chunk
    last = tl.minimum(first + chunk, entries)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    found = tl.zeros([ROWS], tl.int32) + first
    d = tl.arange(0, WIDE)
    asked = tl.load(x + d[None, :], asking & (d < D)[None, :], 0.0).to(KIND)
    for at in range(first, last, BLOCK):
        row = at + tl.arange(0, BLOCK)
        real = row < last
        own = keys + row.to(tl.int64)[None, :] * key_k
        if D <= WIDE:  # the queries stay where they are for all keys
            key = tl.load(own + d[:, None], real[None, :] & (d < D)[:, None], 0.0).to(KIND)
            scores = tl.dot(asked, key, input_precision=PRECISION)
        else:
            scores = tl.zeros([ROWS, BLOCK], tl.float32)
            for begin in range(0, D, WIDE):
                e = begin + d
                some = tl.load(x + e[None, :], asking & (e < D)[None, :], 0.0).to(KIND)
                key = tl.load(own + e[:, None], real[None, :] & (e < D)[:, None], 0.0).to(KIND)
                scores = tl.dot(some, key, scores, input_precision=PRECISION)
        if scale is not None:
            scores *= tl.load(scale + book * scale_c + row * scale_k, real, 0.0).to(tl.float32)[None, :]
        scores = tl.where(real[None, :], scores, float("-inf"))
        high, place = tl.max(scores, 1, return_indices=True)
        better = high > top
        found = tl.where(better, at + place, found)
        top = tl.where(better, high, top)
    of = ((book * count + m) * tl.num_programs(2)) + part
    tl.store(index + of, found.to(tl.int64), m < count)
    tl.store(score + of, top, m < count)


@triton.jit
def winner(index, score, row, real, parts, WIDE: tl.constexpr):
    """Return (index, score) of rows [R], the best of their `parts` candidates; lower numbers win ties."""
    part = tl.arange(0, WIDE)
    at = row.to(tl.int64)[:, None] * parts + part[None, :]
    held = real[:, None] & (part < parts)[None, :]
    scores = tl.load(score + at, held, float("-inf"))
    numbers = tl.load(index + at, held, 0x7FFFFFFFFFFFFFFF)
    top = tl.max(scores, 1)
    return tl.min(tl.where(scores == top[:, None], numbers, 0x7FFFFFFFFFFFFFFF), 1), top


@triton.jit
def _best(index, score, found, top, rows, parts, WIDE: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    numbers, scores = winner(index, score, row, real, parts, WIDE)
    tl.store(found + row, numbers, real)
    tl.store(top + row, scores, real)
