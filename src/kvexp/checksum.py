"""The sha256 that names a model's weights in records and memories, remembered so that it is computed once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvexp import embedded

if TYPE_CHECKING:
    from torch import Tensor

_LARGE = 1 << 30


def of_weights(where: str, gguf: str | None, revision: str | None) -> str:
    """Return the sha256 of the weight files of a hub id or a folder, which must be there already.

    One file gives its own sha256; several give that of the lines "name sha256" in the order of their names.
    """
    files = _weight_files(where, gguf, revision)
    sums = {file.name: of_file(file) for file in files}
    if len(sums) == 1:
        return next(iter(sums.values()))
    return hashlib.sha256("".join(f"{name} {sums[name]}\n" for name in sorted(sums)).encode()).hexdigest()


def of_file(file: Path) -> str:
    """Return the sha256 of a file; the cache folder remembers it as long as size and time of change stay."""
    real = file.resolve()
    size = real.stat().st_size
    state = {"path": str(real), "size": size, "mtime_ns": real.stat().st_mtime_ns}
    name = hashlib.sha256(str(real).encode()).hexdigest()[:32]
    note = embedded.cache_folder() / "sha256" / f"{name}.json"
    try:
        known = json.loads(note.read_text())
        if {key: known[key] for key in state} == state:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if size > _LARGE:
        embedded.say(f"hashing {file.name} ({size / 1e9:.1f} GB, once)")
    found = embedded.sha256_of(real)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        fresh = note.with_name(f"{note.name}.{os.getpid()}")
        fresh.write_text(json.dumps({**state, "sha256": found}))
        fresh.replace(note)
    except OSError:
        pass  # A cache that cannot be written only costs time.
    return found


def of_tensors(tensors: Mapping[str, Tensor], kind: str) -> str:
    """Return the sha256 of named tensors: of the model type, their names, dtypes, shapes and bytes."""
    import torch

    total = hashlib.sha256(f"{kind}\n".encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _weight_files(where: str, gguf: str | None, revision: str | None) -> list[Path]:
    from transformers.utils import cached_file

    def find(name: str) -> Path | None:
        try:
            found = cached_file(where, name, revision=revision, local_files_only=True)
        except OSError:
            return None
        return Path(found) if found else None

    index = None if gguf else find("model.safetensors.index.json")
    names = {gguf or "model.safetensors"}
    if index:
        names = set(json.loads(index.read_text())["weight_map"].values())
    return [file for file in map(find, sorted(names)) if file]
