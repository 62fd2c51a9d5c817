"""Attention-State Memory in one step of decoding: look a state up, and merge it with local attention's.

Source: "Context Memorization for Efficient Long Context Generation" (attention-state memory, ASM). Whitening
and corrections of a state are the caller's: queries come whitened, and corrected memories are not fused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp_kernels.lookup.cells import Cells, lookup_two_level
from kvexp_kernels.lookup.reference import lookup_flat
from kvexp_kernels.merge_states.reference import merge_states


@dataclass(frozen=True)
class Entries:
    """C codebooks of K entries, each of h heads.

    keys `[C, K, d]` unit vectors, or int8 with `key_scale [C, K]`; a `[C, K, h, Dv]`, or int8 with
    `a_scale [C, K, h]`; log_z `[C, K, h]` float32. With `cells` lookup is two-level over their keys, of which
    `probe` cells are scanned.
    """

    keys: Tensor
    a: Tensor
    log_z: Tensor
    key_scale: Tensor | None = None
    a_scale: Tensor | None = None
    cells: Cells | None = None
    probe: int = 16

    def tensors(self) -> list[Tensor]:
        """Every tensor held."""
        held = [self.keys, self.a, self.log_z, self.key_scale, self.a_scale]
        return [t for t in held if t is not None] + (self.cells.tensors() if self.cells else [])


def lookup_merge(
    x: Tensor, entries: Entries, local_a: Tensor, local_s: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Look up the state of each query in `x [C, n, d]` and merge it with its local one.

    `local_a [C, n, h, Dv]`, `local_s [C, n, h]`: output and natural log-sum-exp of attention to local rows.
    Returns `(a, s, index)`: the merged state, a in the dtype of `local_a` and s in float32 (float64 when an
    input is), and the entries `[C, n]` int64 that were found. As in `merge_states`, a local state with
    s = -inf adds nothing.
    """
    if entries.cells is None:
        index = lookup_flat(x, entries.keys, entries.key_scale)[0]
    else:
        index = lookup_two_level(x, entries.cells, entries.probe)[0]
    book = torch.arange(len(x), device=x.device)[:, None]
    a, s = entries.a[book, index], entries.log_z[book, index]
    if entries.a_scale is not None:
        a = a.to(s.dtype) * entries.a_scale[book, index].to(s.dtype)[..., None]
    a, s = merge_states(a, s, local_a, local_s)
    return a.to(local_a.dtype), s, index
