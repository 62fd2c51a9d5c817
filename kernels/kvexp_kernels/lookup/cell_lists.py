"""The cells of all codebooks of a layer as views of where they lie, for code that reads memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp_kernels.lookup.two_level import TwoLevelIndex


@dataclass(frozen=True)
class CellLists:
    """Cells of C codebooks.

    centres: C times `[M, d]`; for each cell of each codebook in turn its keys `[n, d]`, all float32 or all
    float16, and their entry numbers `[n]` int64, to which `base` times the number of the codebook is added.
    """

    centres: Sequence[Tensor]
    keys: Sequence[Tensor]
    entries: Sequence[Tensor]
    base: int = 0

    @classmethod
    def of(cls, indices: Sequence[TwoLevelIndex]) -> CellLists:
        """Return the cells of an index for each codebook."""
        spans = [
            (index, slice(low, high))
            for index in indices
            for low, high in zip(index.offsets[:-1], index.offsets[1:], strict=True)
        ]
        return cls(
            [index.centres for index in indices],
            [index.keys[span] for index, span in spans],
            [index.entries[span] for index, span in spans],
        )

    @property
    def half(self) -> bool:
        """Whether keys are in half precision, so that what they leave open is decided by others."""
        return self.keys[0].dtype == torch.float16

    def radii(self) -> tuple[Tensor, float]:
        """Return the least cosine of each cell's keys with its centre, and the length of the longest key."""
        centres = [centre for book in self.centres for centre in book]
        lengths = [k.float().norm(dim=1).clamp(min=1e-30) for k in self.keys]
        cosines = [(k.float() @ c / n).amin() for k, c, n in zip(self.keys, centres, lengths, strict=True)]
        return torch.stack(cosines), max(float(n.max()) for n in lengths)

    def tensors(self) -> list[Tensor]:
        """Every tensor held."""
        return [*self.centres, *self.keys, *self.entries]
