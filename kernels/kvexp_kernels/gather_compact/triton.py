"""Compaction on a GPU without a second buffer.

A program owns some channels of one head and walks over its rows from the front: it reads a block of rows that
stay, waits until all of them are in registers, and writes them. Since kept rows are ascending, a block's
targets end before the sources of the next begin. Programs share nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from kvexp_kernels.backend import power

CHANNELS = 16  # of a program: few, so that one head alone fills several processors


def gather_compact(tensors: Sequence[Tensor], keep: Tensor) -> list[Tensor]:
    """Move the rows that stay to the front, as the reference does."""
    batch, heads, count = keep.shape
    keep = keep.contiguous()
    for x in tensors:
        rows = x if x.dim() == 4 else x[..., None]
        width = rows.shape[-1]
        channels = min(CHANNELS, power(width, 1))
        if rows.numel() and count:
            _compact[(triton.cdiv(width, channels), batch * heads)](
                rows,
                keep,
                heads,
                count,
                *rows.stride(),
                width,
                CHANNELS=channels,
                BLOCK=4096 // channels,
                num_warps=8,
            )
    return [x[:, :, :count] for x in tensors]


@triton.jit
def _compact(x, keep, heads, count, x_b, x_h, x_s, x_d, width, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(1)
    b, h = (program // heads).to(tl.int64), (program % heads).to(tl.int64)
    d = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    x += b * x_b + h * x_h + d.to(tl.int64)[None, :] * x_d
    keep += program.to(tl.int64) * count
    for start in tl.range(0, count, BLOCK, num_stages=1):
        to = start + tl.arange(0, BLOCK)
        real = to < count
        source = tl.load(keep + to, real, 0)
        moving = (real & (source != to))[:, None] & (d < width)[None, :]
        row = tl.load(x + source[:, None] * x_s, moving)
        tl.debug_barrier()
        tl.store(x + to.to(tl.int64)[:, None] * x_s, row, moving)
