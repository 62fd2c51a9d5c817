"""Which twin of an operation takes a call, and how finely a kernel's work is cut."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

ASSUMED_PROCESSORS = 132  # where there is no device to ask: those of an H100


def fused(*tensors: Tensor | None) -> bool:
    """Return whether Triton's twin takes a call with these tensors (None: an argument left out).

    It does where Triton is installed and all tensors are on a CUDA device; not for float64, which goes
    through plain torch, and not where gradients are asked for, which no kernel has.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    return (
        all(tensor.is_cuda and tensor.dtype != torch.float64 for tensor in given)
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given))
        and _triton_found()
    )


@cache
def _triton_found() -> bool:
    return find_spec("triton") is not None


def parts_for(rows: int, programs: int, block: int, device: torch.device) -> int:
    """Return into how many parts to cut a scan over `rows`, when there are `programs` such scans.

    Enough for two programs on each processor, but none shorter than four blocks.
    """
    wanted = -(-2 * _processors(device) // max(1, programs))
    return max(1, min(wanted, rows // (4 * block)))


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return ASSUMED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def power(n: int, least: int = 16) -> int:
    """Return the smallest power of two that is no less than `n` and `least`."""
    return max(least, 1 << max(0, n - 1).bit_length())


def dot_precision(dtype: torch.dtype) -> str:
    """Return how tensor cores multiply numbers of this dtype.

    float32 as three products of TF32, which leaves an error near that of float32; others are exact products.
    """
    return "tf32x3" if dtype == torch.float32 else "tf32"


def rows_of_a_tile(width: int, dtype: torch.dtype) -> int:
    """Return how many rows of `width` numbers attention holds at once, without spilling registers.

    0: none, rows of this width are too much for a kernel.
    """
    narrow = dtype != torch.float32
    if width > (256 if narrow else 128):
        return 0
    return min(64, (8192 if narrow else 4096) // power(width))
