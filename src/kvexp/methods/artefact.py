"""Tensors and a manifest in a folder: whole or not at all, and refused when damaged.

`kind` says what they are ("memory"), and names the file of the tensors.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from kvexp.errors import UserError
from kvexp.files import write_atomic
from kvexp.methods.memory.states import refuse_mismatch


def write(
    folder: Path, tensors: dict[str, torch.Tensor], manifest: dict[str, Any], kind: str = "memory"
) -> None:
    """Write `tensors` and then manifest.json, which holds their sha256, into `folder`."""
    data = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
    write_atomic(folder / f"{kind}.safetensors", data)
    text = json.dumps({**manifest, "sha256": hashlib.sha256(data).hexdigest()}, indent=2, sort_keys=True)
    write_atomic(folder / "manifest.json", f"{text}\n".encode())


def read(
    folder: Path, expected: dict[str, Any], kind: str = "memory"
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return (tensors, manifest).

    Raises UserError when the manifest differs from `expected`, or when a file is missing or not what was
    written.
    """
    name = f"{kind}.safetensors"
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise _damaged(kind, folder, "manifest.json cannot be read") from error
    if not isinstance(manifest, dict):
        raise _damaged(kind, folder, "manifest.json is not a mapping")
    refuse_mismatch(manifest, expected, folder)
    try:
        data = (folder / name).read_bytes()
    except OSError as error:
        raise _damaged(kind, folder, f"{name} is missing") from error
    if hashlib.sha256(data).hexdigest() != manifest.get("sha256"):
        raise _damaged(kind, folder, f"{name} is not what was written")
    return load(data), manifest


def _damaged(kind: str, folder: Path, what: str) -> UserError:
    return UserError(
        f"the {kind} in {folder} is damaged ({what}): remove that folder so that it is built again"
    )
