"""Random eviction: what a method has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvexp.errors import UserError
from kvexp.methods.eviction.base import EvictionMethod

if TYPE_CHECKING:
    from torch import Tensor

    from kvexp.methods.eviction.view import View


@dataclass(frozen=True)
class Random(EvictionMethod):
    """Keep rows drawn uniformly, each KV head its own: the floor of every comparison, from no paper.

    The score is a hash of `seed`, layer, head and true position, so that neither the batch nor the chunks of
    a prompt change what is kept. A row keeps its score: while decoding, the rows held stay a uniform sample
    of all tokens seen, not of those that were still there.
    """

    id: ClassVar[str] = "random"
    reads: ClassVar[tuple[str, ...]] = ("positions",)

    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a seed that the hash cannot tell from another."""
        super().__post_init__()
        if not 0 <= self.seed < 2**32:
            raise UserError(f"method.seed={self.seed} is not possible: use a number from 0 to {2**32 - 1}")

    def score(self, view: View) -> Tensor:
        """Return uniform numbers in [0, 1), multiples of 2^-24, [B, H, S]."""
        import torch

        heads = torch.arange(view.heads, device=view.positions.device)[:, None]
        state = torch.zeros_like(view.positions, dtype=torch.int64)
        for number in (self.seed, view.index, heads, view.positions.long()):
            state = mixed(state ^ number)
        return (state >> 8).float() / 2**24


def mixed(state: Tensor) -> Tensor:
    """Return 32-bit numbers (held in int64) that depend on every bit of `state`: a bijection.

    Two rounds of xor with a shift and multiplication by an odd constant: the 32-bit finaliser of MurmurHash3,
    on the state plus one, since 0 is its fixed point.
    """
    state = (state + 1) & 0xFFFFFFFF
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF  # int64 wraps: the low 32 bits are right
    return state ^ (state >> 16)
