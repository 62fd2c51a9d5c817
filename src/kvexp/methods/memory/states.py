"""The attention-state memory itself: per layer a codebook of keys with the states they stand for.

Kept as safetensors and a JSON manifest; a memory that was built for something else is refused with a sentence.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvexp.errors import UserError
from kvexp.methods.memory.grouping import Grouping

FORMAT = 1  # of the files; part of the fingerprint


@dataclass
class LayerMemory:
    """Entries of one full-attention layer. C codebooks of K entries, h heads each (see Grouping).

    keys [C, K, h*D] unit vectors; norm [C, K] of the centroids; a [C, K, h, Dv]; log_z [C, K, h] float32;
    count [C, K] samples per entry; std [C, K, h] spread of log Z inside an entry. Optional: whiten [Hq, D, D]
    applied to queries before the lookup; residual [C, h*D, h*(Dv+1)] linear correction; slope [C, K, h, D] mean
    attended key in the query's frame. Entries that found no sample repeat entry 0 and are never chosen.
    """

    grouping: Grouping
    tensors: dict[str, torch.Tensor]

    def __getattr__(self, name: str) -> Any:
        tensors = self.__dict__.get("tensors", {})
        if name in tensors:
            return tensors[name]
        if name in ("whiten", "residual", "slope", "key_scale", "a_scale"):
            return None
        raise AttributeError(name)

    USED = ("keys", "a", "log_z", "whiten", "residual", "slope", "key_scale", "a_scale")

    def used(self) -> list[torch.Tensor]:
        """The tensors that inference reads (norms only where a correction needs the centroid itself)."""
        names = (*self.USED, "norm") if {"residual", "slope"} & set(self.tensors) else self.USED
        return [self.tensors[name] for name in names if name in self.tensors]


@dataclass
class StateMemory:
    """All layers' entries, the rows that sliding-window layers keep, and what the memory was built for."""

    layers: dict[int, LayerMemory]
    rows: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)  # sliding layers: keys, values, ...
    manifest: dict[str, Any] = field(default_factory=dict)

    @property
    def seen(self) -> int:
        """Tokens of the prefix: queries continue at this position."""
        return int(self.manifest["seen"])

    def nbytes(self) -> int:
        """Bytes that inference holds."""
        held = [t for layer in self.layers.values() for t in layer.used()]
        held += [rows[name] for rows in self.rows.values() for name in ("keys", "values")]
        return sum(t.numel() * t.element_size() for t in held)

    def to(self, device: torch.device | str) -> StateMemory:
        """Move every tensor to a device."""
        for layer in self.layers.values():
            layer.tensors = {name: t.to(device) for name, t in layer.tensors.items()}
        self.rows = {i: {name: t.to(device) for name, t in rows.items()} for i, rows in self.rows.items()}
        return self

    def save(self, folder: Path) -> None:
        """Write memory.safetensors and manifest.json into `folder`, each whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        flat = {f"layer.{i}.{k}": t.contiguous() for i, m in self.layers.items() for k, t in m.tensors.items()}
        flat |= {f"rows.{i}.{k}": t.contiguous() for i, rows in self.rows.items() for k, t in rows.items()}
        groupings = {str(i): vars(m.grouping) for i, m in self.layers.items()}
        temporary = folder / f".memory.{os.getpid()}"
        save_file(flat, temporary)
        os.replace(temporary, folder / "memory.safetensors")
        text = json.dumps({**self.manifest, "format": FORMAT, "groupings": groupings}, indent=2, sort_keys=True)
        temporary.write_text(text + "\n")
        os.replace(temporary, folder / "manifest.json")

    @classmethod
    def load(cls, folder: Path, expected: dict[str, Any]) -> StateMemory:
        """Read a memory; UserError if it was built for something else than `expected` says."""
        manifest = json.loads((folder / "manifest.json").read_text())
        refuse_mismatch(manifest, {**expected, "format": FORMAT}, folder)
        flat = load_file(folder / "memory.safetensors")
        layers: dict[int, LayerMemory] = {
            int(i): LayerMemory(Grouping(**grouping), {}) for i, grouping in manifest.pop("groupings").items()
        }
        rows: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in flat.items():
            kind, index, key = name.split(".", 2)
            target = layers[int(index)].tensors if kind == "layer" else rows.setdefault(int(index), {})
            target[key] = tensor
        return cls(layers, rows, manifest)


def refuse_mismatch(manifest: dict[str, Any], expected: dict[str, Any], where: Path | str) -> None:
    """Raise UserError that names the first thing in which a memory differs from what is asked of it."""
    for name, value in expected.items():
        found = manifest.get(name)
        if found != value:
            raise UserError(
                f"the memory in {where} was built for {name}={found!r}, not {value!r}: "
                "point store_dir elsewhere, or remove that folder so that it is built again"
            )
