"""Pieces that several kernels share; needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def absorb(acc, high, mass, scores, value, PRECISION: tl.constexpr):
    """Take a block of keys into a running softmax: acc [M, Dv], high and mass [M], all float32.

    `scores` [M, S] are logits in base 2, -inf where a key is not seen; value [S, Dv].
    """
    new = tl.maximum(high, tl.max(scores, 1))
    base = tl.where(new == float("-inf"), 0.0, new)  # nothing seen yet: -inf minus -inf is NaN
    weight = tl.exp2(scores - base[:, None])
    fade = tl.exp2(high - base)
    mass = mass * fade + tl.sum(weight, 1)
    acc = acc * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
    return acc, new, mass


@triton.jit
def closed(acc, high, mass):
    """Return the attention state (a, natural log-sum-exp) of a running softmax; (0, -inf) where empty."""
    empty = mass == 0.0
    a = acc / tl.where(empty, 1.0, mass)[:, None]
    s = (high + tl.log2(tl.where(empty, 1.0, mass))) * LN2
    return a, tl.where(empty, float("-inf"), s)


@triton.jit
def merged(a1, s1, a2, s2):
    """Merge the states (a [M, Dv], s [M]) of two disjoint sets of keys; a side with s = -inf adds nothing."""
    empty1, empty2 = s1 == float("-inf"), s2 == float("-inf")
    a1 = tl.where(empty1[:, None], 0.0, a1)
    a2 = tl.where(empty2[:, None], 0.0, a2)
    high = tl.maximum(s1, s2)
    base = tl.where(empty1 & empty2, 0.0, high)
    w1, w2 = tl.exp(s1 - base), tl.exp(s2 - base)
    mass = w1 + w2
    whole = tl.where(mass == 0.0, 1.0, mass)
    a = a1 * (w1 / whole)[:, None] + a2 * (w2 / whole)[:, None]
    return a, tl.where(mass == 0.0, float("-inf"), base + tl.log(whole))


@triton.jit
def turned(left, right, cos, sin):
    """Turn the two numbers of each band."""
    return left * cos - right * sin, right * cos + left * sin
