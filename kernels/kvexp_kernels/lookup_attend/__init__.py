"""One decoding step of a layer on a memory: lookup, attention to local rows, and their merge."""

from __future__ import annotations

from kvexp_kernels.lookup_attend.native import NativeStep, compiled, native_step
from kvexp_kernels.lookup_attend.reference import lookup_attend

__all__ = ["NativeStep", "compiled", "lookup_attend", "native_step"]
