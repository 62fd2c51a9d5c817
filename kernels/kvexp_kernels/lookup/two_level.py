"""Two-level lookup: score cells of similar keys first, then only the keys of the best cells.

Attention-State Memory searches its memory so. With n1 cells of which m are probed it scores about
n1 + m K / n1 of K keys. The paper leaves the construction open: here the cells come from spherical k-means
over the keys, which are reordered so that a cell is one contiguous slice. Slices are scanned in place:
gathering the keys of m cells would copy them, and padding cells to one size would multiply them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ITERATIONS = 10


@dataclass(frozen=True)
class TwoLevelIndex:
    """An index over the unit keys `[K, d]` of one codebook."""

    centres: Tensor  # [cells, d] unit vectors, first level; no cell is empty
    keys: Tensor  # [K, d], cell after cell; within a cell in order of entry number
    entries: Tensor  # [K] int64, the entry number of each row of keys
    offsets: tuple[int, ...]  # cell i is keys[offsets[i]:offsets[i + 1]]

    @classmethod
    def build(cls, keys: Tensor, cells: int, seed: int = 0) -> TwoLevelIndex:
        """Cluster unit `keys [K, d]` into at most `cells` cells (fewer when some stay empty)."""
        centres, member = _spherical_kmeans(keys, min(cells, len(keys)), seed)
        sizes = torch.bincount(member, minlength=len(centres))
        entries = torch.argsort(member, stable=True)
        offsets = [0, *sizes[sizes > 0].cumsum(0).tolist()]
        return cls(centres[sizes > 0].contiguous(), keys[entries].contiguous(), entries, tuple(offsets))

    def tensors(self) -> list[Tensor]:
        """Every tensor held."""
        return [self.centres, self.keys, self.entries]

    def probe_for(self, x: Tensor, recall: float) -> int:
        """Return the fewest cells to search so that a share `recall` of the queries `x [n, d]` finds its key.

        Found means what flat lookup finds. It holds for queries like these, so take some that built nothing.
        """
        x = x.to(self.keys.dtype)
        row = torch.cat([(part @ self.keys.T).argmax(1) for part in x.split(1024)])
        ends = torch.tensor(self.offsets[1:], device=x.device)
        cell = torch.searchsorted(ends, row, right=True)
        near = x @ self.centres.T
        better = (near > near.gather(1, cell[:, None])).sum(1)  # cells that are searched before the right one
        return int(better.sort().values[max(0, math.ceil(recall * len(x)) - 1)]) + 1

    def search(self, x: Tensor, probe: int = 16) -> tuple[Tensor, int]:
        """Find for each query of `x [n, d]` the best key among its `probe` best cells.

        Returns `(index, scored)`: int64 entry numbers `[n]`, and how many keys were scored for the n queries
        together, first level included. Equal scores go to the lower entry number. The same as the flat lookup
        when every cell is probed. A few queries on the CPU go through their slices one by one; many go
        through the cells, each scored once for all queries that chose it.
        """
        x = x.to(self.keys.dtype)
        probe = min(probe, len(self.centres))
        plain = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
        search = self._by_query if plain and len(x) * probe <= len(self.centres) else self._by_cell
        return search(x, probe)

    def _by_query(self, x: Tensor, probe: int) -> tuple[Tensor, int]:
        """NumPy views of the same memory: for such small products torch's overhead exceeds the work."""
        centres, keys, entries = self.centres.numpy(), self.keys.numpy(), self.entries.numpy()
        found, scored = [], len(x) * len(centres)
        for query in x.detach().numpy():
            best, best_entry = -np.inf, 0
            for cell in np.argpartition(centres @ query, -probe)[-probe:].tolist():
                low, high = self.offsets[cell], self.offsets[cell + 1]
                scores = keys[low:high] @ query
                row = int(scores.argmax())
                score, entry = scores[row], entries[low + row]
                if score > best or (score == best and entry < best_entry):
                    best, best_entry = score, entry
                scored += high - low
            found.append(best_entry)
        return torch.from_numpy(np.array(found, dtype=np.int64)), scored

    def _by_cell(self, x: Tensor, probe: int) -> tuple[Tensor, int]:
        best = torch.full((len(x),), -torch.inf, dtype=x.dtype, device=x.device)
        found = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        chosen = (x @ self.centres.T).topk(probe, dim=1).indices.flatten()
        asking = torch.argsort(chosen, stable=True) // probe  # queries, cell after cell
        counts = torch.bincount(chosen, minlength=len(self.centres)).tolist()
        scored = len(x) * len(self.centres)
        for cell, who in enumerate(asking.split(counts)):
            if not len(who):
                continue
            inside = slice(self.offsets[cell], self.offsets[cell + 1])
            score, row = (x[who] @ self.keys[inside].T).max(dim=1)
            entry, old, old_entry = self.entries[inside][row], best[who], found[who]
            better = (score > old) | ((score == old) & (entry < old_entry))
            best[who] = torch.where(better, score, old)
            found[who] = torch.where(better, entry, old_entry)
            scored += len(who) * (inside.stop - inside.start)
        return found, scored


def _spherical_kmeans(keys: Tensor, cells: int, seed: int) -> tuple[Tensor, Tensor]:
    """Unit centres `[cells, d]` and the cell `[K]` of each key, by Lloyd iterations on the cosine."""
    chosen = torch.randperm(len(keys), generator=torch.Generator().manual_seed(seed))[:cells]
    centres = keys[chosen.to(keys.device)]
    for _ in range(ITERATIONS):
        member = (keys @ centres.T).max(dim=1).indices
        sums = torch.zeros_like(centres).index_add_(0, member, keys)
        length = sums.norm(dim=1, keepdim=True)
        centres = torch.where(length > 0, sums / length, centres)
    return centres, (keys @ centres.T).max(dim=1).indices
