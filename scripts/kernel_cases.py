"""Calls of every kernel's host code on tensors that hold nothing, for compiling without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

B, HQ, H, S, K = 1, 32, 8, 8192, 8192  # sequences, query heads, KV heads, rows, memory entries

Case = Callable[[torch.dtype], Any]


def cases(head: int) -> dict[str, dict[str, Case]]:
    """Return, for each operation, calls of its host code on tensors that hold nothing, for a head dim."""
    from kvexp_kernels.dequant_attend.triton import dequant_attend
    from kvexp_kernels.gather_compact.triton import gather_compact
    from kvexp_kernels.lookup.triton import lookup_flat
    from kvexp_kernels.lookup.triton_cells import lookup_two_level
    from kvexp_kernels.lookup_merge.triton import lookup_merge
    from kvexp_kernels.merge_states.triton import merge_many, merge_states
    from kvexp_kernels.ragged_attend.triton import ragged_attend
    from kvexp_kernels.rerotate.triton import rerotate
    from kvexp_kernels.shift_correct.triton import shift_correct
    from kvexp_kernels.trig_score.triton import trig_score

    def state(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return of(B, HQ, 1, head, dtype=dtype), of(B, HQ, 1)

    def local(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return of(H, 2, 2, head, dtype=dtype), of(H, 2, 2)

    def codes(bits: int) -> Case:
        def call(dtype: torch.dtype) -> Any:
            return dequant_attend(
                of(B, HQ, 1, head, dtype=dtype), packed(head, bits, -2), packed(head, bits, -1), 0.1
            )

        return call

    def attend(heads: int, rows: int) -> Case:
        def call(dtype: torch.dtype) -> Any:
            stored = of(H * rows, head, dtype=dtype)
            edge = of(B, H, dtype=torch.int64)
            return ragged_attend(of(B, heads, 1, head, dtype=dtype), stored, stored, edge, edge, 0.1, rows)

        return call

    def flat(count: int, keys: torch.dtype | None = None) -> Case:
        def call(dtype: torch.dtype) -> Any:
            scale = of(H, K) if keys == torch.int8 else None
            return lookup_flat(
                of(H, count, 2 * head, dtype=dtype), of(H, K, 2 * head, dtype=keys or dtype), scale
            )

        return call

    return {
        "lookup": {
            "flat, decode": flat(2),
            "flat, decode, int8 keys": flat(2, torch.int8),
            "flat, 512 tokens": flat(1024),
            "two-level": lambda t: lookup_two_level(of(H, 2, 2 * head, dtype=t), cells(head, t), 16),
        },
        "merge_states": {
            "two": lambda t: merge_states(*state(t), *state(t)),
            "parts": lambda t: merge_many(of(8, B, HQ, head, dtype=t), of(8, B, HQ)),
        },
        "lookup_merge": {
            "flat": lambda t: lookup_merge(of(H, 2, 2 * head, dtype=t), entries(head, t), *local(t)),
            "two-level": lambda t: lookup_merge(
                of(H, 2, 2 * head, dtype=t), entries(head, t, cells(head, t)), *local(t)
            ),
        },
        "trig_score": {
            "sizes": lambda t: trig_score(of(B, H, S, head, dtype=t), of(B, HQ, head), spread(head, False)),
            "squares": lambda t: trig_score(of(B, H, S, head, dtype=t), of(B, HQ, head), spread(head, True)),
        },
        "gather_compact": {
            "keys, positions": lambda t: gather_compact(
                [of(B, H, S, head, dtype=t), of(B, H, S, dtype=torch.int32)],
                of(B, H, S // 2, dtype=torch.int64),
            ),
        },
        "rerotate": {"halves": lambda t: rerotate(of(B, H, S, head, dtype=t), turn(head))},
        "shift_correct": {
            "moved, keys": lambda t: shift_correct(
                of(B, H, S, head, dtype=t), shift(head, turn(head)), turn(head)
            ),
            "values": lambda t: shift_correct(of(B, H, S, head, dtype=t), shift(head, None)),
        },
        "dequant_attend": {"2 bits": codes(2), "4 bits": codes(4)},
        "ragged_attend": {"decode, group of 4": attend(HQ, S), "decode, group of 1": attend(H, S)},
    }


def of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor without memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def packed(head: int, bits: int, dim: int) -> Any:
    """Return S packed rows in groups of 32."""
    from kvexp_kernels.quantise import Packed

    grid = (S // 32, head) if dim == -2 else (S, head // 32)
    scale = of(B, H, *grid, dtype=torch.float16)
    return Packed(of(B, H, S, head * bits // 8, dtype=torch.uint8), scale, scale, bits, 32, dim, head)


def cells(head: int, dtype: torch.dtype) -> Any:
    """Return an index of 128 cells."""
    from kvexp_kernels.lookup import Cells

    whole = torch.int64
    keys, centres = of(H, K, 2 * head, dtype=dtype), of(H, 128, 2 * head, dtype=dtype)
    return Cells(centres, keys, of(H, K, dtype=whole), of(H, 129, dtype=whole))


def entries(head: int, dtype: torch.dtype, index: Any = None) -> Any:
    """Return a memory whose entries serve two heads."""
    from kvexp_kernels.lookup_merge import Entries

    return Entries(of(H, K, 2 * head, dtype=dtype), of(H, K, 2, head, dtype=dtype), of(H, K, 2), cells=index)


def spread(head: int, squares: bool) -> Any:
    """Return weights of bands, or of squares."""
    from kvexp_kernels.trig_score import Spread

    return Spread(of(B, HQ, head if squares else head // 2), head // 2, squares=squares)


def turn(head: int) -> Any:
    """Return a rotation of each row."""
    from kvexp_kernels.rerotate import Turn

    return Turn(of(S, head // 2), of(S, head // 2))


def shift(head: int, turned: Any) -> Any:
    """Return the shift of ten units."""
    from kvexp_kernels.shift_correct import Shift

    return Shift(of(10, H, head), of(B, S, dtype=torch.int64), of(B, S), turned)
