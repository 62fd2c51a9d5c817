"""A stream of samples that several processes read, each a share of it, and what they find put together.

Whatever is summed over samples (a pass of k-means, attention states, a regression) can be summed share by
share: each process reads its own, the sums are merged in the order of the shares, and all go on from the
result. It is that of one process up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self, TypeVar

from torch import Tensor

Tensors = dict[str, Tensor]


class Sum(Protocol):
    """What was found in some samples, and can take in what was found in others."""

    def state(self) -> Tensors:
        """Return all that it holds."""
        ...

    def restored(self, state: Tensors) -> Self:
        """Return another one, of this shape and on its device, that holds `state`."""
        ...

    def merge(self, other: Self) -> None:
        """Take in the samples of another."""
        ...


S = TypeVar("S", bound=Sum)


class Shares:
    """One process's place among those that read a stream; as it stands, the only one.

    All call `total` and `once` in the same order.
    """

    number, count = 0, 1

    def rows(self, total: int) -> range:
        """Return which of `total` samples are read here."""
        return range(total * self.number // self.count, total * (self.number + 1) // self.count)

    def total(self, mine: S) -> S:
        """Return the sum over all shares, where `mine` is over this one."""
        return mine

    def once(self, make: Callable[[], Tensors]) -> Tensors:
        """Return what `make` gives to the first process."""
        return make()


WHOLE = Shares()
