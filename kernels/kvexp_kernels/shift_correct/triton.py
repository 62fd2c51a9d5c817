"""Moving and shifting rows on a GPU: one read and one write of each row, whatever is asked of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvexp_kernels.backend import power
from kvexp_kernels.rerotate.reference import Turn
from kvexp_kernels.shift_correct.reference import Shift
from kvexp_kernels.tiles import turned


def shift_correct(x: Tensor, shift: Shift, move: Turn | None = None, out: Tensor | None = None) -> Tensor:
    """Return corrected rows, as the reference does."""
    return correct(x, move, shift, out)


def correct(x: Tensor, move: Turn | None, shift: Shift | None, out: Tensor | None = None) -> Tensor:
    """Return rows `x [B, H, C, D]` turned by `move` plus `shift`, either of which may be left out."""
    batch, heads, rows, width = x.shape
    out = torch.empty_like(x) if out is None else out
    layout = move or (None if shift is None else shift.turn)
    bands = 0 if layout is None else layout.bands
    if move is not None and shift is not None and shift.turn is not None:
        other = shift.turn
        if (bands, move.adjacent, move.last) != (other.bands, other.adjacent, other.last):
            raise ValueError("rows and their shift do not turn alike: their bands differ")
    block = max(1, 2048 // power(width))
    grid = (triton.cdiv(rows, block), batch * heads)
    if x.numel():
        _correct[grid](
            x,
            out,
            *_angles(move, x),
            *_shift(shift, x),
            *_angles(None if shift is None else shift.turn, x),
            heads,
            rows,
            *x.stride(),
            *out.stride(),
            D=width,
            F=bands,
            AT=width - 2 * bands if layout is not None and layout.last else 0,
            ADJACENT=layout is not None and layout.adjacent,
            BANDS=power(bands, 1),
            STILL=power(width - 2 * bands, 1),
            BLOCK=block,
        )
    return out


def _angles(turn: Turn | None, x: Tensor) -> list[Tensor | int | None]:
    """cos, sin and their four strides, without copying what broadcasts."""
    if turn is None or not turn.bands:
        return [None, None, 0, 0, 0, 0]
    cos, sin = (t.expand(*x.shape[:3], turn.bands) for t in (turn.cos, turn.sin))
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    return [cos, sin, *cos.stride()]


def _shift(shift: Shift | None, x: Tensor) -> list[Tensor | int | None]:
    """mean, units, weights, the strides of weights."""
    if shift is None:
        return [None, None, None, 0, 0, 0]
    units = shift.units.expand(x.shape[0], x.shape[2]).contiguous()
    if shift.weights is None:
        return [shift.mean.contiguous(), units, None, 0, 0, 0]
    weights = shift.weights if shift.weights.dim() == 3 else shift.weights[:, None]
    weights = weights.expand(x.shape[:3])
    return [shift.mean.contiguous(), units, weights, *weights.stride()]


@triton.jit
def _correct(
    x, out, cos, sin, c_b, c_h, c_t, c_f, mean, units, weights, w_b, w_h, w_t,
    mean_cos, mean_sin, m_b, m_h, m_t, m_f, heads, rows, x_b, x_h, x_t, x_d, o_b, o_h, o_t, o_d,
    D: tl.constexpr, F: tl.constexpr, AT: tl.constexpr, ADJACENT: tl.constexpr,
    BANDS: tl.constexpr, STILL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(1)
    b, h = (program // heads).to(tl.int64), (program % heads).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = row < rows
    x += b * x_b + h * x_h + row[:, None] * x_t
    out += b * o_b + h * o_h + row[:, None] * o_t
    if mean is not None:
        unit = tl.load(units + b * rows + row, real, -1).to(tl.int64)
        weight = tl.where(real & (unit >= 0), 1.0, 0.0)
        if weights is not None:
            weight *= tl.load(weights + b * w_b + h * w_h + row * w_t, real, 0.0).to(tl.float32)
        shifted = (unit >= 0)[:, None]
        mean += (tl.maximum(unit, 0) * heads + h)[:, None] * D
    if F > 0:
        f = tl.arange(0, BANDS)
        inside = real[:, None] & (f < F)[None, :]
        if ADJACENT:
            first, second = AT + 2 * f[None, :], AT + 2 * f[None, :] + 1
        else:
            first, second = AT + f[None, :], AT + F + f[None, :]
        left = tl.load(x + first * x_d, inside, 0.0).to(tl.float32)
        right = tl.load(x + second * x_d, inside, 0.0).to(tl.float32)
        if cos is not None:
            at = b * c_b + h * c_h + row[:, None] * c_t + f[None, :] * c_f
            c, s = (
                tl.load(cos + at, inside, 0.0).to(tl.float32),
                tl.load(sin + at, inside, 0.0).to(tl.float32),
            )
            left, right = turned(left, right, c, s)
        if mean is not None:
            more = tl.load(mean + first, inside & shifted, 0.0).to(tl.float32)
            also = tl.load(mean + second, inside & shifted, 0.0).to(tl.float32)
            if mean_cos is not None:
                at = b * m_b + h * m_h + row[:, None] * m_t + f[None, :] * m_f
                c = tl.load(mean_cos + at, inside, 0.0).to(tl.float32)
                s = tl.load(mean_sin + at, inside, 0.0).to(tl.float32)
                more, also = turned(more, also, c, s)
            left += more * weight[:, None]
            right += also * weight[:, None]
        tl.store(out + first * o_d, left.to(out.dtype.element_ty), inside)
        tl.store(out + second * o_d, right.to(out.dtype.element_ty), inside)
    if D > 2 * F:
        n = tl.arange(0, STILL)
        inside = real[:, None] & (n < D - 2 * F)[None, :]
        place = (0 if AT > 0 else 2 * F) + n[None, :]
        still = tl.load(x + place * x_d, inside, 0.0).to(tl.float32)
        if mean is not None:
            still += tl.load(mean + place, inside & shifted, 0.0).to(tl.float32) * weight[:, None]
        tl.store(out + place * o_d, still.to(out.dtype.element_ty), inside)
