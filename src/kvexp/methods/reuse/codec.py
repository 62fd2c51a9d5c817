"""A store in few bits: units are packed as a method of storage packs rows, and come back as they were."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from kvexp.cache.chunk_store import Parts

if TYPE_CHECKING:
    from kvexp.methods.storage.base import StorageMethod

WIDTHS = "widths"  # the part that says how wide keys and values are


class PackedCodec:
    """The codec (`kvexp.cache.chunk_store.Codec`) that packs with the schemes of `storage` (kivi, ott)."""

    def __init__(self, storage: StorageMethod, dtype: torch.dtype) -> None:
        self.storage, self.dtype = storage, dtype
        # `of` is no matter of the store, which holds every row.
        given = sorted((name, value) for name, value in asdict(storage).items() if name != "of")
        knobs = ",".join(f"{name}={value}" for name, value in given)
        self.name = f"{storage.id}({knobs})"

    def encode(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Parts:
        """Return the packed rows of keys [H, n, D] and values [H, n, Dv]."""
        unit = self.storage.packed(keys[None], values[None], layer)
        return {**unit.tensors(), WIDTHS: torch.tensor([keys.shape[-1], values.shape[-1]])}

    def decode(self, layer: int, parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as they come back."""
        from kvexp.cache.quantised_unit import QuantisedUnit

        tensors: dict[str, Any] = {name: tensor for name, tensor in parts.items() if name != WIDTHS}
        key_width, value_width = parts[WIDTHS].tolist()
        unit = QuantisedUnit.of_tensors(tensors, self.storage.scheme(layer), (key_width, value_width))
        keys, values = unit.restored(self.dtype)
        return keys[0], values[0]
