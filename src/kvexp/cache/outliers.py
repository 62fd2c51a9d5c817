"""Tokens that a quantised cache keeps in full beside its packed rows: those with the smallest keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Outliers:
    """keys/values [B, H, P, D] in the model's dtype, and which rows of the sequence these are.

    `rows` [B, H, P] int32, -1 for none: heads may hold different numbers of them.
    `active` [B, H, P] bool: still among the smallest so far; the others have been replaced by later ones, and
    stay, since what is packed in their place is no longer them. Never changed in place: forks share it.
    """

    keys: torch.Tensor
    values: torch.Tensor
    rows: torch.Tensor
    active: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor held."""
        return [self.keys, self.values, self.rows, self.active]

    def each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Outliers:
        """Return outliers made by applying `function` to every tensor."""
        return Outliers(*map(function, self.tensors()))

    def hidden(self, start: int, stop: int) -> torch.Tensor:
        """Return which of the rows start, ..., stop - 1 are held here, counted from `start`; -1 elsewhere."""
        inside = (self.rows >= start) & (self.rows < stop)
        return (self.rows - start).masked_fill(~inside, -1)

    def exchange(
        self, keys: torch.Tensor, values: torch.Tensor, first: int, count: int, pool: int
    ) -> tuple[Outliers, torch.Tensor, torch.Tensor]:
        """Let the rows of a block [B, H, m, D], the first of which is row `first`, compete with those held.

        The `count` rows with the smallest sum |K| over channels, of block and active ones together, are
        active from now on (ties to the earlier row). A head whose replaced ones would become more than `pool`
        takes none. Returns the outliers, and keys and values of the block in which those that were taken are
        replaced by the mean of the others, which widens no group's range.
        """
        sizes = torch.cat([_size(self.keys).masked_fill(~self.active, torch.inf), _size(keys)], dim=-1)
        smallest = sizes.argsort(dim=-1, stable=True)[..., :count]
        chosen = torch.zeros_like(sizes, dtype=torch.bool).scatter_(-1, smallest, True)
        held = self.rows.shape[-1]
        stays, taken = self.active & chosen[..., :held], chosen[..., held:]
        replaced = (self.rows >= 0) & ~stays
        fits = replaced.sum(-1, keepdim=True) <= pool
        stays, taken = torch.where(fits, stays, self.active), taken & fits
        grown = self._with(stays, keys, values, taken, first, count)
        return grown, _smoothed(keys, taken), _smoothed(values, taken)

    def _with(
        self,
        stays: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        taken: torch.Tensor,
        first: int,
        count: int,
    ) -> Outliers:
        """Return these and the rows `taken` [B, H, m] of a block, without the places that no head uses."""
        real, where = taken.sort(dim=-1, descending=True, stable=True)
        real, where = real[..., :count], where[..., :count]
        rows = torch.cat([self.rows, (where + first).to(torch.int32).masked_fill(~real, -1)], dim=-1)
        grown = Outliers(
            torch.cat([self.keys, _gathered(keys, where)], dim=-2),
            torch.cat([self.values, _gathered(values, where)], dim=-2),
            rows,
            torch.cat([stays, real], dim=-1),
        )
        used, order = (rows >= 0).sort(dim=-1, descending=True, stable=True)
        order = order[..., : int(used.sum(-1).max())]
        return grown.each(lambda x: _gathered(x, order) if x.dim() == 4 else x.gather(-1, order))


def no_outliers(keys: torch.Tensor, values: torch.Tensor) -> Outliers:
    """Return an empty set for the heads of these keys and values [B, H, S, D]."""
    rows = torch.empty(*keys.shape[:2], 0, dtype=torch.int32, device=keys.device)
    return Outliers(keys[..., :0, :], values[..., :0, :], rows, rows.bool())


def _size(keys: torch.Tensor) -> torch.Tensor:
    return keys.float().abs().sum(-1)


def _gathered(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.gather(-2, index[..., None].expand(*index.shape, x.shape[-1]))


def _smoothed(x: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    """Return rows in which those `taken` are the mean of the others."""
    others = (~taken)[..., None].float()
    mean = (x.float() * others).sum(-2, keepdim=True) / others.sum(-2, keepdim=True)
    return torch.where(taken[..., None], mean.to(x.dtype), x)
