"""The trigonometric score on a GPU: each key is read once, for its dot product and the sizes of its bands.

Vectors and weights are float32 and stay in registers; products on tensor cores have the error of float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvexp_kernels.backend import power
from kvexp_kernels.trig_score.reference import Spread

BLOCK = 32  # keys of a tile


def trig_score(keys: Tensor, vectors: Tensor, spread: Spread | None = None) -> Tensor:
    """Return scores `[B, Hq, S]`, as the reference does."""
    batch, heads, rows, width = keys.shape
    queries = vectors.shape[1]
    bands = spread.bands if spread else 0
    group = power(queries // heads)
    score = torch.empty(batch, queries, rows, dtype=torch.float32, device=keys.device)
    vectors = _wide(vectors, keys)
    weights = None if spread is None else _wide(spread.weights, keys)
    if score.numel():
        _score[(triton.cdiv(rows, BLOCK), heads, batch)](
            keys,
            vectors,
            weights,
            score,
            rows,
            queries // heads,
            *keys.stride(),
            vectors.stride(0),
            0 if weights is None else weights.stride(0),
            D=width,
            F=bands,
            WEIGHTS=0 if weights is None else weights.shape[-1],
            AT=width - 2 * bands if spread and spread.last else 0,
            ADJACENT=bool(spread and spread.adjacent),
            SQUARES=bool(spread and spread.squares),
            BANDS=power(bands),
            STILL=power(width - 2 * bands),
            GROUP=group,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return score


def _wide(x: Tensor, keys: Tensor) -> Tensor:
    """[B or 1, Hq, n] in float32 on the device of keys, contiguous for each sequence."""
    return x.to(keys.device, torch.float32).contiguous().expand(keys.shape[0], -1, -1)


@triton.jit
def _add(scores, numbers, vectors, head, real, place, held, STEP: tl.constexpr):
    """Add to scores [G, S] the products of numbers [n, S] with those at `place` [n] of each head's vector."""
    at = head[:, None] * STEP + place[None, :]
    vector = tl.load(vectors + at, real[:, None] & held[None, :], 0.0)
    return tl.dot(vector, numbers, scores, input_precision="tf32x3")


@triton.jit
def _score(
    keys, vectors, weights, score, rows, group, k_b, k_h, k_s, k_d, v_b, w_b,
    D: tl.constexpr, F: tl.constexpr, WEIGHTS: tl.constexpr, AT: tl.constexpr, ADJACENT: tl.constexpr,
    SQUARES: tl.constexpr, BANDS: tl.constexpr, STILL: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.arange(0, GROUP)
    head, real = h * group + g, g < group
    keys += b * k_b + h * k_h + row[None, :] * k_s
    vectors += b * v_b
    if weights is not None:
        weights += b * w_b
    scores = tl.zeros([GROUP, BLOCK], tl.float32)
    if F > 0:
        f = tl.arange(0, BANDS)
        held = f < F
        first = AT + (2 * f if ADJACENT else f)
        second = first + (1 if ADJACENT else F)
        inside = held[:, None] & (row < rows)[None, :]
        left = tl.load(keys + first[:, None] * k_d, inside, 0.0).to(tl.float32)
        right = tl.load(keys + second[:, None] * k_d, inside, 0.0).to(tl.float32)
        scores = _add(scores, left, vectors, head, real, first, held, D)
        scores = _add(scores, right, vectors, head, real, second, held, D)
        if weights is not None:
            if SQUARES:
                scores = _add(scores, left * left, weights, head, real, first, held, WEIGHTS)
                scores = _add(scores, right * right, weights, head, real, second, held, WEIGHTS)
            else:
                size = tl.sqrt(left * left + right * right)
                scores = _add(scores, size, weights, head, real, f, held, WEIGHTS)
    if D > 2 * F:
        n = tl.arange(0, STILL)
        held = n < D - 2 * F
        place = n + (0 if AT > 0 else 2 * F)
        still = tl.load(keys + place[:, None] * k_d, held[:, None] & (row < rows)[None, :], 0.0).to(
            tl.float32
        )
        scores = _add(scores, still, vectors, head, real, place, held, D)
        if weights is not None:
            if SQUARES:
                scores = _add(scores, still * still, weights, head, real, place, held, WEIGHTS)
            else:
                scores = _add(scores, tl.abs(still), weights, head, real, F + n, held, WEIGHTS)
    at = (b * tl.num_programs(1) * group + head)[:, None] * rows + row[None, :]
    tl.store(score + at, scores, real[:, None] & (row < rows)[None, :])
