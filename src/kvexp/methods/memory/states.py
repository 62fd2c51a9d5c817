"""The attention-state memory itself: per layer a codebook of keys with the states they stand for.

Kept as safetensors and a JSON manifest; one that was built for something else is refused with a sentence.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file

from kvexp.errors import UserError
from kvexp.methods.memory.grouping import Grouping

FORMAT = 3  # of the files and of how they are made; part of the fingerprint
TENSORS = "memory.safetensors"


@dataclass
class LayerMemory:
    """Entries of one full-attention layer. C codebooks of K entries, h heads each (see Grouping).

    keys [C, K, h*D] unit vectors; norm [C, K] of the centroids; a [C, K, h, Dv]; log_z [C, K, h] float32;
    count [C, K] samples per entry; std [C, K, h] spread of log Z inside an entry. Optional: whiten
    [Hq, D, D], applied to queries before the lookup; residual [C, h*D, h*(Dv+1)], a linear correction; slope
    [C, K, h, D], the mean attended key in the query's frame. Where a codebook has fewer entries than another,
    copies of its entry 0 fill it up: they are never chosen.
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
    """All layers' entries, what the memory was built for, and the last `rows` of sliding-window layers.

    rows: by layer, keys and values [1, Hkv, n, D], slots [n], positions [1, n].
    """

    FORMAT: ClassVar[int] = FORMAT

    layers: dict[int, LayerMemory]
    rows: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
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

    def to(self, device: torch.device | str | Sequence[torch.device]) -> StateMemory:
        """Move every tensor to a device, or to that of its layer among several."""

        def moved(index: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            place = device if isinstance(device, torch.device | str) else device[index]
            return {name: t.to(place) for name, t in tensors.items()}

        for index, layer in self.layers.items():
            layer.tensors = moved(index, layer.tensors)
        self.rows = {index: moved(index, rows) for index, rows in self.rows.items()}
        return self

    def save(self, folder: Path) -> None:
        """Write memory.safetensors and manifest.json into `folder`, each whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        flat = {
            f"layer.{i}.{k}": t.contiguous() for i, m in self.layers.items() for k, t in m.tensors.items()
        }
        flat |= {f"rows.{i}.{k}": t.contiguous() for i, rows in self.rows.items() for k, t in rows.items()}
        groupings = {str(i): vars(m.grouping) for i, m in self.layers.items()}
        temporary = folder / f".memory.{os.getpid()}.tmp"
        save_file(flat, temporary)
        sha256 = _sha256(temporary)
        os.replace(temporary, folder / TENSORS)
        manifest = {**self.manifest, "format": FORMAT, "sha256": sha256, "groupings": groupings}
        text = json.dumps(manifest, indent=2, sort_keys=True)
        temporary.write_text(text + "\n")
        os.replace(temporary, folder / "manifest.json")

    @classmethod
    def load(cls, folder: Path, expected: dict[str, Any]) -> StateMemory:
        """Read a memory; UserError if it is damaged or was built for something else than `expected` says."""
        manifest = _manifest(folder)
        refuse_mismatch(manifest, {**expected, "format": FORMAT}, folder)
        for key in ("sha256", "groupings", "seen"):
            if key not in manifest:
                raise _damaged(folder, f"manifest.json has no {key}")
        if not (folder / TENSORS).is_file():
            raise _damaged(folder, f"{TENSORS} is missing")
        if _sha256(folder / TENSORS) != manifest["sha256"]:
            raise _damaged(folder, f"{TENSORS} is not what was written")
        flat = load_file(folder / TENSORS)
        layers: dict[int, LayerMemory] = {
            int(i): LayerMemory(Grouping(**grouping), {}) for i, grouping in manifest.pop("groupings").items()
        }
        rows: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in flat.items():
            kind, index, key = name.split(".", 2)
            target = layers[int(index)].tensors if kind == "layer" else rows.setdefault(int(index), {})
            target[key] = tensor
        return cls(layers, rows, manifest)


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise _damaged(folder, "manifest.json cannot be read") from error
    if not isinstance(manifest, dict):
        raise _damaged(folder, "manifest.json is not a mapping")
    return manifest


def _damaged(folder: Path, what: str) -> UserError:
    return UserError(
        f"the memory in {folder} is damaged ({what}): remove that folder so that it is built again"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_mismatch(manifest: dict[str, Any], expected: dict[str, Any], where: Path | None = None) -> None:
    """Raise UserError that names the first thing in which a memory differs from what is asked of it."""
    for name, value in expected.items():
        found = manifest.get(name)
        if name == "knobs":
            had, asked = ({f"method.{k}": v for k, v in some.items()} for some in (found or {}, value))
            refuse_mismatch(had, asked, where)
        elif found != value:
            advice = "build another one for it with method.prepare"
            if where:
                advice = "point store_dir elsewhere, or remove that folder so that it is built again"
            place = f" in {where}" if where else ""
            raise UserError(f"the memory{place} was built for {name}={found!r}, not {value!r}: {advice}")
