"""Tensors in a folder come back as they were, or are refused with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvexp.errors import UserError
from kvexp.methods import artefact


def written(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.tensor(7)}
    artefact.write(folder, tensors, {"context": "one", "format": 1})
    return tensors


def test_round_trip(tmp_path: Path) -> None:
    tensors = written(tmp_path / "new")
    found, manifest = artefact.read(tmp_path / "new", {"context": "one"})
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert manifest["context"] == "one" and manifest["format"] == 1
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "manifest.json",
        "memory.safetensors",
    ]


def test_what_was_built_for_something_else_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(UserError, match=r"built for context='one', not 'two': point store_dir elsewhere"):
        artefact.read(tmp_path, {"context": "two"})


def test_damage_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    data = (tmp_path / "memory.safetensors").read_bytes()
    (tmp_path / "memory.safetensors").write_bytes(data[:-1] + b"x")
    with pytest.raises(UserError, match=r"damaged \(memory.safetensors is not what was written\)"):
        artefact.read(tmp_path, {})
    (tmp_path / "memory.safetensors").unlink()
    with pytest.raises(UserError, match=r"damaged \(memory.safetensors is missing\)"):
        artefact.read(tmp_path, {})
    for text, reason in (("[1]", "is not a mapping"), ("{", "cannot be read")):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(UserError, match=rf"damaged \(manifest.json {reason}\): remove that folder"):
            artefact.read(tmp_path, {})
