"""Scores of whole contexts on disk, so that other budgets of a grid need not score a context again.

One file for what decides them: model, contexts, and the knobs of scoring. Peaks that were measured while
scoring are kept with them, so that a record says the same whether scores were made or found.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)
FORMAT = 1


@dataclass(frozen=True)
class Scores:
    """Scores [B, H, S] of each layer, and the most rows and bytes that were held while they were made."""

    layers: list[torch.Tensor]
    rows: int
    bytes: int


@dataclass(frozen=True)
class ScoreStore:
    """A folder of scores of one model, told by `model`, the sha256 of its weights."""

    folder: Path
    model: str

    def get(self, facts: Mapping[str, Any], make: Callable[[], Scores]) -> tuple[Scores, bool]:
        """Return the scores that `facts` describe, and whether they were found; else they are made and kept.

        A file that cannot be read is made anew.
        """
        from safetensors.torch import save_file

        text = json.dumps({**facts, "model": self.model, "format": FORMAT}, sort_keys=True)
        path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.safetensors"
        found = _read(path, text)
        if found is not None:
            log.info("using the scores in %s", path)
            return found, True
        made = make()
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        tensors = {f"{i:04d}": layer.cpu().contiguous() for i, layer in enumerate(made.layers)}
        save_file(tensors, temporary, {"facts": text, "rows": str(made.rows), "bytes": str(made.bytes)})
        os.replace(temporary, path)
        return made, False


def _read(path: Path, text: str) -> Scores | None:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            notes = file.metadata()
            layers = [file.get_tensor(name) for name in sorted(file.keys())]
        return Scores(layers, int(notes["rows"]), int(notes["bytes"])) if notes["facts"] == text else None
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
