"""How far reused rows are off, what one shift for a whole unit explains of it, and how the rest spreads.

A residual is a fresh minus a stored row. Tensors are [H, n, D]: heads, tokens of a unit, numbers of a row;
energies are sums of squares. Everything is summed in float64, on the CPU, for each head apart.

Source of the question: "AgentKVShift" (2026, arXiv 2607.21604), which takes the residuals of a unit for one
shared vector, and states that it holds 64 to 86 % of their energy.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST = 2  # tokens at the start of a unit whose share is counted
ROUNDING = 1e-9  # residuals of less energy, as a part of their rows', are rounding


def mean_energy(residual: Tensor) -> Tensor:
    """Return n |mean|^2 of residuals [H, n, D], [H]: the energy that subtracting their mean removes."""
    return residual.shape[-2] * residual.mean(-2).square().sum(-1)


def singular_energies(x: Tensor) -> Tensor:
    """Return the squared singular values of x [H, n, D], largest first, [H, min(n, D)]."""
    wide = x.shape[-2] <= x.shape[-1]
    gram = x @ x.transpose(-1, -2) if wide else x.transpose(-1, -2) @ x
    return torch.linalg.eigvalsh(gram).flip(-1).clamp(min=0)


class ResidualSums:
    """Sums over units of the residuals of one kind of rows in one layer.

    Units whose residuals are `rounding` alone (those that stand where they were encoded) count in energies,
    and not in means over units: shares, spectra.
    """

    def __init__(self, rounding: float = ROUNDING) -> None:
        self.rounding = rounding
        self._sums: dict[str, Tensor] = {}

    def add(self, residual: Tensor, fresh: Tensor) -> None:
        """Take a unit: its residuals, and the fresh rows themselves, both [H, n, D] with n above 0."""
        residual, states = residual.detach().cpu().double(), fresh.detach().cpu().double()
        tokens = residual.square().sum(-1)  # [H, n]
        energy, explained = tokens.sum(-1), mean_energy(residual)
        heads, n, _ = residual.shape
        stale = energy > self.rounding * states.square().sum((-2, -1))
        found = {
            "tokens": torch.full((heads,), float(n), dtype=torch.float64),
            "norm": tokens.sqrt().sum(-1),
            "energy": energy,
            "states": states.square().sum((-2, -1)),
            "explained": explained,
            "chance": energy / n,
            "first": tokens[:, 0],
            "first_two": tokens[:, :FIRST].sum(-1),
            "units": stale.double(),
            "share": _part(explained, energy, stale),
        }
        self._add(found | self._spectra(residual, energy, stale))

    def _spectra(self, residual: Tensor, energy: Tensor, stale: Tensor) -> dict[str, Tensor]:
        """Singular energies before and after the mean is taken away, as shares of all energy, [H, D]."""
        spectrum, centred = (
            _padded(_part(singular_energies(x), energy[:, None], stale[:, None]), x.shape[-1])
            for x in (residual, residual - residual.mean(-2, keepdim=True))
        )
        left = centred.sum(-1)
        spread = left > self.rounding  # nothing is left of a constant residual, or of a single token's
        return {
            "spectrum": spectrum,
            "centred": centred,
            "spread": spread.double(),
            "top_of_left": _part(centred[:, 0], left, spread),
        }

    def _add(self, found: dict[str, Tensor]) -> None:
        self._sums = {name: x + self._sums.get(name, 0) for name, x in found.items()}

    def figures(self, by_head: bool = False) -> dict[str, Tensor]:
        """Return what was found, over all heads ([], spectra [D]) or for each ([H], [H, D]).

        norm: mean length of a residual. relative: energy of residuals over that of the fresh rows.
        explained: share of the energy that the units' means hold; chance: what they would hold on average
        if tokens had nothing in common. unit_share: the same share as the mean over units.
        first, first_two: share of the energy in a unit's first token, and in its first two.
        spectrum, centred: singular energies of a unit before and after its mean is taken away, as shares of
        its whole energy (the second sum to what is not explained), mean over units; top, top_centred: the
        largest before, and the largest after as a share of what is then left.
        Where nothing was counted there is no number (nan).
        """
        sums = self._sums if by_head else {name: x.sum(0) for name, x in self._sums.items()}
        units = sums["units"]
        spectrum = sums["spectrum"] / units[..., None]
        return {
            "norm": sums["norm"] / sums["tokens"],
            "relative": sums["energy"] / sums["states"],
            **{name: sums[name] / sums["energy"] for name in ("explained", "chance", "first", "first_two")},
            "unit_share": sums["share"] / units,
            "top": spectrum[..., 0],
            "top_centred": sums["top_of_left"] / sums["spread"],
            "spectrum": spectrum,
            "centred": sums["centred"] / units[..., None],
        }


class RemovedSums:
    """Sums over units of what a correction removes from residuals."""

    def __init__(self) -> None:
        self._before: Tensor | float = 0.0
        self._after: Tensor | float = 0.0

    def add(self, before: Tensor, after: Tensor) -> None:
        """Take residuals of the same tokens before and after the correction, both [H, n, D]."""
        self._before = self._before + before.detach().cpu().double().square().sum((-2, -1))
        self._after = self._after + after.detach().cpu().double().square().sum((-2, -1))

    def removed(self, by_head: bool = False) -> Tensor:
        """Return 1 - energy after / energy before, [] or by head [H]: below 0 where it made things worse.

        Where nothing was off there is no number (nan).
        """
        before, after = (torch.as_tensor(x, dtype=torch.float64) for x in (self._before, self._after))
        return 1 - after / before if by_head else 1 - after.sum() / before.sum()


def _part(x: Tensor, whole: Tensor, where: Tensor) -> Tensor:
    """Return x / whole where it counts, 0 elsewhere."""
    return torch.where(where, x / torch.where(where, whole, torch.ones_like(whole)), torch.zeros_like(x))


def _padded(x: Tensor, length: int) -> Tensor:
    """Return x [H, m] with zeros behind, [H, length]."""
    return torch.nn.functional.pad(x, (0, length - x.shape[-1]))
