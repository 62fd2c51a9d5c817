"""Bytes, as held: of tensors, and of the process."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def mib(size: float) -> float:
    """Return a number of bytes in MiB (2**20 bytes)."""
    return size / 2**20


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested mappings, lists, tuples and sets; other values are passed over."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for item in value:
            yield from tensors_in(item)


def tensor_bytes(value: Any) -> int:
    """Return the bytes that the tensors in `value` keep alive.

    A storage counts once however many tensors share it, and whole even when only a slice of it is in use:
    that is what is held. So a view of a large buffer costs the buffer, and an expanded tensor costs what
    stands behind it.
    """
    sizes: dict[tuple[str, int], int] = {}
    for tensor in tensors_in(value):
        storage = tensor.untyped_storage()
        sizes[str(storage.device), storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def peak_rss() -> int:
    """Return the most bytes of memory that this process has had in use at once.

    Linux's own high-water mark is taken where there is one: the figure of getrusage also holds that of the
    process that started this one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for row in status.read_text().splitlines():
            if row.startswith("VmHWM:"):
                return int(row.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
