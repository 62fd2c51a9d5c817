"""The twin in C++: one call for all of a layer, whose memory's addresses are written down once."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from kvexp_kernels.lookup.cell_lists import CellLists
from kvexp_kernels.lookup_merge.reference import Entries
from kvexp_kernels.native import library

SOURCE = Path(__file__).with_name("native.cpp")
MOST = 16  # samples of a codebook: more of them share what a product of torch reads
MOST_ROWS = 2048  # local rows: more of them are worth torch's threads
THREADS = 4  # from which on torch's product with all keys is as fast
_P, _I = ctypes.c_void_p, ctypes.c_int64


def compiled() -> ctypes.CDLL | None:
    """Return the library, compiled on first use (seconds); None where the plain form has to serve."""
    return library(SOURCE, "lookup", "lookup_attend")


class _Memory(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("keys", "centres", "cells", "cell_keys", "cell_entries", "cell_sizes")),
        ("cell_radii", _P),
        *((name, _P) for name in ("a", "log_z", "codes", "a_scale", "head_of")),
        *((name, _I) for name in ("books", "held", "probe", "samples", "heads", "width", "value_width")),
        *((name, _I) for name in ("half", "base")),
        ("longest", ctypes.c_float),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("x", "query", "key", "value")),
        *((name, _I) for name in ("batch", "query_heads", "kv_heads", "rows", "query_width")),
        *((name, _I) for name in ("key_batch", "key_head", "key_row")),
        *((name, _I) for name in ("value_batch", "value_head", "value_row")),
        ("scale", ctypes.c_float),
        *((name, _P) for name in ("out", "lse", "index")),
        ("scored", _I),
    )


class NativeStep:
    """Decoding steps on one layer's entries, on the CPU, as the reference defines; see `native_step`."""

    def __init__(self, code: ctypes.CDLL, entries: Entries, lists: CellLists | None, head_of: Tensor) -> None:
        books, held, heads, value_width = entries.a.shape
        self._lookup, self._lookup_attend = code.lookup, code.lookup_attend
        self._kept = [*entries.tensors(), head_of, lists]  # whose addresses the library is given
        self.samples, self.value_width = head_of.shape[1], value_width
        coded = entries.a_scale is not None
        self._memory = _Memory(
            keys=entries.keys.data_ptr(),
            a=None if coded else entries.a.data_ptr(),
            log_z=entries.log_z.data_ptr(),
            codes=entries.a.data_ptr() if coded else None,
            a_scale=None if entries.a_scale is None else entries.a_scale.data_ptr(),
            head_of=head_of.data_ptr(),
            books=books,
            held=held,
            probe=entries.probe,
            samples=self.samples,
            heads=heads,
            width=entries.keys.shape[-1],
            value_width=value_width,
        )
        self._in_cells = lists is not None
        if lists is not None:
            self._enter(lists)
        self._address = _P(ctypes.addressof(self._memory))

    def _enter(self, lists: CellLists) -> None:
        """Write the tables of cells."""
        radii, self._memory.longest = lists.radii()
        self._tables = [
            torch.tensor([t.data_ptr() for t in lists.centres]),
            torch.tensor([len(t) for t in lists.centres]),
            torch.tensor([t.data_ptr() for t in lists.keys]),
            torch.tensor([t.data_ptr() for t in lists.entries]),
            torch.tensor([len(t) for t in lists.keys]),
            radii,
        ]
        names = ("centres", "cells", "cell_keys", "cell_entries", "cell_sizes", "cell_radii")
        for name, table in zip(names, self._tables, strict=True):
            setattr(self._memory, name, table.data_ptr())
        self._memory.half, self._memory.base = lists.half, lists.base

    def takes_samples(self, x: Tensor) -> bool:
        """Whether `lookup` has a say on samples x [C, B n, d]: it works on one thread, for a few of them."""
        count = x.shape[1]
        fits = x.dtype == torch.float32 and x.is_cpu and count <= MOST and count % self.samples == 0
        return fits and (self._in_cells or torch.get_num_threads() < THREADS)

    def takes(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether `lookup_attend` has a say: so for local rows too, and where no gradient is asked for."""
        if not (query.is_cpu and query.dtype == key.dtype == value.dtype == torch.float32):
            return False
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            return False
        fits = key.shape[0] == value.shape[0] == len(query) and key.shape[2] <= MOST_ROWS
        return fits and key.stride(3) == value.stride(3) == 1 and self.takes_samples(x)

    def lookup(self, x: Tensor) -> tuple[Tensor, int]:
        """Return the entries [C, B n] of samples x [C, B n, d], and how many keys were scored."""
        x = x.contiguous()
        index = torch.empty(x.shape[:2], dtype=torch.int64)
        step = _Step(x=x.data_ptr(), batch=x.shape[1] // self.samples, index=index.data_ptr())
        self._lookup(self._address, ctypes.byref(step))
        return index, step.scored

    def lookup_attend(
        self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, int]:
        """Return (a, s) as the reference does, and how many keys were scored."""
        x, query = x.contiguous(), query.contiguous()
        batch, heads, width = query.shape
        a, s = query.new_empty(batch, heads, self.value_width), query.new_empty(batch, heads)
        step = _Step(
            x.data_ptr(), query.data_ptr(), key.data_ptr(), value.data_ptr(),
            batch, heads, *key.shape[1:3], width, *key.stride()[:3], *value.stride()[:3],
            scale, a.data_ptr(), s.data_ptr(),
        )  # fmt: skip
        self._lookup_attend(self._address, ctypes.byref(step))
        return a, s, step.scored


def native_step(entries: Entries, head_of: Tensor, lists: CellLists | None = None) -> NativeStep | None:
    """Return steps on these entries, flat or in the cells of `lists`; None where the twin has no say.

    It has for float32 on a CPU, where `a` may be in codes. `entries.cells` is not read, and `entries.keys`
    only where lookup is flat or lists hold keys in half precision.
    """
    numbers = [entries.log_z, entries.a if entries.a_scale is None else entries.a_scale]
    if lists is None or lists.half:
        numbers.append(entries.keys)
    held = [*numbers, entries.a, head_of, *(lists.tensors() if lists else ())]
    plain = all(t.device.type == "cpu" and t.is_contiguous() for t in held)
    if not plain or any(t.dtype != torch.float32 for t in numbers):
        return None
    code = compiled()
    return None if code is None else NativeStep(code, entries, lists, head_of)
