"""Ridge regression from a stream of samples, for the linear residual correction of a memory.

Not in the Attention-State Memory paper: after clustering, one matrix W per codebook corrects the state of
entry k for a query q that is not at its key, (a, s) ~ (a_k, s_k) + (q - q_k) W. The caller forms X = q - q_k
and Y = (a - a_k, s - s_k); there is no intercept, since both are differences from an entry.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RidgeRegression:
    """Accumulates X^T X and X^T Y in float64, so that memory does not grow with the number of samples."""

    def __init__(self, d: int, out: int) -> None:
        """Start empty: `d` inputs, `out` outputs."""
        self._xx = torch.zeros(d, d, dtype=torch.float64)
        self._xy = torch.zeros(d, out, dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Take n samples `x [n, d]`, `y [n, out]`."""
        x, y = x.double(), y.double()
        self._xx += x.T @ x
        self._xy += x.T @ y

    def merge(self, other: RidgeRegression) -> None:
        """Take in the samples of another regression (another shard's)."""
        self._xx += other._xx
        self._xy += other._xy

    def state(self) -> dict[str, Tensor]:
        """Return all that it holds."""
        return {"xx": self._xx, "xy": self._xy}

    def restored(self, state: dict[str, Tensor]) -> RidgeRegression:
        """Return another one that holds `state`."""
        other = RidgeRegression(*self._xy.shape)
        other._xx, other._xy = state["xx"], state["xy"]
        return other

    def solve(self, ridge: float = 0.1) -> Tensor:
        """Return `W [d, out]` float64 that minimises |X W - Y|^2 + r |W|^2.

        r is `ridge` times the mean diagonal element of X^T X. W is zero when X was always zero (every sample
        at its key).
        """
        penalty = ridge * self._xx.diagonal().mean()
        if penalty == 0:
            return torch.linalg.pinv(self._xx, hermitian=True) @ self._xy
        factor = torch.linalg.cholesky(self._xx + penalty * torch.eye(len(self._xx), dtype=torch.float64))
        return torch.cholesky_solve(self._xy, factor)
