"""A bounded pool of distinct rows from a stream: those of the lowest priority number."""

from __future__ import annotations

import torch
from torch import Tensor


class DistinctPool:
    """Keeps the `size` distinct rows of lowest priority number out of any number offered.

    With random priorities it is a random sample of the distinct rows; with negated distances, the farthest
    ones. The result does not depend on how the stream is cut into blocks. `overflow` tells that a further
    distinct row existed: without it, the pool holds every distinct row of the stream. `offered` counts all
    rows. Rows live on the CPU.
    """

    def __init__(self, size: int) -> None:
        """Start empty."""
        self.size, self.overflow, self.offered = size, False, 0
        self.rows = torch.empty(0, 0)
        self.priority = torch.empty(0, dtype=torch.float64)

    def offer(self, rows: Tensor, priority: Tensor) -> None:
        """Show the pool n rows `[n, d]` with their priority numbers `[n]`."""
        rows, priority = rows.cpu(), priority.cpu().double()
        self.offered += len(rows)
        if self.overflow:
            better = priority < self.priority[-1]
            rows, priority = rows[better], priority[better]
        if not len(rows):
            return
        if len(self.rows):
            rows, priority = torch.cat([self.rows, rows]), torch.cat([self.priority, priority])
        kept = self._best(rows, priority)
        self.rows, self.priority = rows[kept], priority[kept]

    def merge(self, other: DistinctPool) -> None:
        """Take in what another pool of the same size has kept of other rows."""
        offered = self.offered + other.offered
        self.offer(other.rows, other.priority)
        self.overflow, self.offered = self.overflow or other.overflow, offered

    def state(self) -> dict[str, Tensor]:
        """Return all that it holds."""
        numbers = torch.tensor([int(self.overflow), self.offered])
        return {"rows": self.rows, "priority": self.priority, "numbers": numbers}

    def restored(self, state: dict[str, Tensor]) -> DistinctPool:
        """Return another one that holds `state`."""
        other = DistinctPool(self.size)
        other.rows, other.priority = state["rows"], state["priority"]
        overflow, other.offered = state["numbers"].tolist()
        other.overflow = bool(overflow)
        return other

    def _best(self, rows: Tensor, priority: Tensor) -> list[int]:
        """Indices of the first `size` distinct rows in order of priority; earlier rows win ties."""
        content = (rows + 0.0).numpy()  # adding zero turns -0.0, which has other bytes, into 0.0
        seen: set[bytes] = set()
        kept: list[int] = []
        for i in torch.argsort(priority, stable=True).tolist():
            row = content[i].tobytes()
            if row in seen:
                continue
            if len(kept) == self.size:
                self.overflow = True
                break
            seen.add(row)
            kept.append(i)
        return kept
