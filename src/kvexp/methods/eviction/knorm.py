"""Key norms: rows whose keys are short receive most attention, so the longest keys leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvexp.errors import UserError
from kvexp.methods.eviction.base import EvictionMethod

if TYPE_CHECKING:
    from torch import Tensor

    from kvexp.methods.eviction.view import View


@dataclass(frozen=True)
class Knorm(EvictionMethod):
    """Keep the rows with the smallest L2 norm of the key, per KV head.

    Source: Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (2024,
    arXiv 2406.11430). Nothing is protected, as in kvpress; norms before and after rotation are equal.

    `skip_layers`: so many of the first layers keep everything (the paper leaves two uncompressed; kvpress and
        the default none). The others then hold less, so that the mean over layers is the budget, in whole
        rows: those that do not divide go to the first of them. Layers with a sliding window do not count.
    """

    id: ClassVar[str] = "knorm"
    by_head: ClassVar[bool] = True
    paper: ClassVar[str] = "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression"
    year: ClassVar[str] = "2024"
    reads: ClassVar[tuple[str, ...]] = ("keys",)

    skip_layers: int = 0

    def __post_init__(self) -> None:
        """Refuse a number of layers that is none."""
        super().__post_init__()
        if self.skip_layers < 0:
            raise UserError(f"method.skip_layers={self.skip_layers} is no number of layers: use 0 or more")

    def layer_rows(self, layer: int, n_layers: int, rows: int, length: int) -> int:
        """Return all rows for a layer that is skipped, and an equal share of what is left for the others.

        Raises UserError when the skipped layers leave the others too few.
        """
        others, least = n_layers - self.skip_layers, self.smallest_budget()
        if not self.skip_layers or length <= rows:
            return rows
        if others < 1:
            raise UserError(
                f"method.skip_layers={self.skip_layers} leaves no layer to compress: use fewer than the"
                f" {n_layers} layers of this model that see the whole context"
            )
        left = n_layers * rows - self.skip_layers * length
        if left < others * least:
            needed = -(-(self.skip_layers * length + others * least) // n_layers)
            raise UserError(
                f"budget={rows} cannot hold {length} tokens whole in {self.skip_layers} of {n_layers} layers:"
                f" use budget={needed} or more, or a smaller method.skip_layers"
            )
        if layer < self.skip_layers:
            return length
        return left // others + (layer - self.skip_layers < left % others)

    def score(self, view: View) -> Tensor:
        """Return the negative norm of each key, [B, Hk, S]."""
        import torch

        keys = view.keys if view.keys.dtype == torch.float64 else view.keys.float()
        return -torch.linalg.vector_norm(keys, dim=-1)
