"""Two-level lookup in several codebooks at once: their indices, stacked into rectangular tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp_kernels.lookup.two_level import TwoLevelIndex


@dataclass(frozen=True)
class Cells:
    """Indices of C codebooks of K keys each; a codebook with fewer than M cells is filled up with empty ones.

    centres `[C, M, d]` unit vectors; keys `[C, K, d]` unit vectors, cell after cell; entries `[C, K]` int64,
    the entry number of each row of keys; offsets `[C, M + 1]` int64: cell i of a codebook is its rows
    offsets[i], ..., offsets[i + 1] - 1. Keys may be of lower precision than they were clustered in.
    """

    centres: Tensor
    keys: Tensor
    entries: Tensor
    offsets: Tensor

    @classmethod
    def stack(cls, indices: Sequence[TwoLevelIndex]) -> Cells:
        """Stack the indices of codebooks with equally many keys."""
        most = max(len(index.centres) for index in indices)
        centres, offsets = [], []
        for index in indices:
            lacking = most - len(index.centres)
            centres.append(torch.cat([index.centres, index.centres.new_zeros(lacking, index.keys.shape[1])]))
            offsets.append([*index.offsets, *[index.offsets[-1]] * lacking])
        device = indices[0].keys.device
        return cls(
            torch.stack(centres),
            torch.stack([index.keys for index in indices]),
            torch.stack([index.entries for index in indices]),
            torch.tensor(offsets, dtype=torch.int64, device=device),
        )

    def tensors(self) -> list[Tensor]:
        """Every tensor held."""
        return [self.centres, self.keys, self.entries, self.offsets]

    def each(self, function: Callable[[Tensor], Tensor]) -> Cells:
        """Return cells made by applying `function` to each tensor."""
        return Cells(*(function(tensor) for tensor in self.tensors()))


def lookup_two_level(x: Tensor, cells: Cells, probe: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find for each query of `x [C, n, d]` the best key among those of its `probe` best cells.

    Returns `(index, score, scored)`: int64 entry numbers and their dot products, both `[C, n]`, and how many
    keys were scored for all queries together, first level included, an int64 scalar on the device of `x`.
    Equal cells and equal scores go to the lower number; empty cells are never chosen. Products are formed in
    float32, or in float64 where x is float64.

    Plain torch: scores all keys and hides those of other cells, so it is a definition and saves no work; on a
    CPU `TwoLevelIndex.search` does.
    """
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    x = x.to(work)
    held = cells.offsets.diff()  # [C, M]
    near = (x @ cells.centres.to(work).mT).masked_fill((held == 0)[:, None], -torch.inf)
    # A stable sort leaves equal cells in their order; a cell that is empty is probed and holds nothing.
    chosen = near.sort(dim=-1, descending=True, stable=True).indices[..., :probe]
    row = torch.arange(cells.keys.shape[1], device=x.device)
    of_row = torch.searchsorted(cells.offsets[:, 1:].contiguous(), row.repeat(len(held), 1), right=True)
    probed = torch.zeros_like(near, dtype=torch.bool).scatter_(-1, chosen, True)
    seen = probed.gather(-1, of_row[:, None].expand(-1, x.shape[1], -1))  # [C, n, K]
    score = (x @ cells.keys.to(work).mT).masked_fill(~seen, -torch.inf)
    best = score.amax(-1, keepdim=True)
    entries = cells.entries[:, None].expand_as(score)
    index = entries.masked_fill(score != best, cells.keys.shape[1]).amin(-1)
    return index, best[..., 0], seen.sum() + (held > 0).sum() * x.shape[1]
