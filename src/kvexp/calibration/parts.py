"""What a calibration has collected, part by part: a folder that is there is whole, and stays.

A part is written under a name of its own and renamed when it is complete, so that neither a kill nor a second
process leaves half of one. The plan beside the parts says which traces, in which batches, they are of.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvexp.files import write_atomic

PLAN = "plan.json"


class Parts:
    """The parts in one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, number: int) -> Path:
        """Return the folder of a part."""
        return self.root / f"part-{number:03d}"

    def left(
        self, items: Sequence[Any], batches: Sequence[Sequence[Any]], runs: Sequence[range]
    ) -> list[int]:
        """Return which parts of this plan are not there; those of another plan, or damaged, are removed."""
        self.root.mkdir(parents=True, exist_ok=True)
        ids = hashlib.sha256(repr([list(item) for item in items]).encode()).hexdigest()
        plan = {"items": ids, "batches": [len(batch) for batch in batches], "parts": len(runs)}
        if self._plan() != plan:
            for path in [self.root / PLAN, *self.root.glob("part-*"), *self.root.glob(".part-*")]:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            write_atomic(self.root / PLAN, json.dumps(plan).encode())
        for path in self.root.glob(".part-*"):  # what a killed process was at
            shutil.rmtree(path, ignore_errors=True)
        return [number for number in range(len(runs)) if not self._sound(self.path(number))]

    def begun(self) -> Path:
        """Return the path, not there yet, of a part that is to be filled."""
        return self.root / f".part-{secrets.token_hex(6)}"

    def done(self, number: int, folder: Path) -> None:
        """Put a filled part in its place, with the sizes of its files, unless somebody was faster."""
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        write_atomic(folder / "sizes.json", json.dumps(sizes).encode())
        try:
            os.rename(folder, self.path(number))
        except OSError:
            if not self._sound(self.path(number)):
                raise
            shutil.rmtree(folder)

    def _plan(self) -> Any:
        try:
            return json.loads((self.root / PLAN).read_bytes())
        except (OSError, ValueError):
            return None

    def _sound(self, folder: Path) -> bool:
        """Return whether a part is as it was written; one that is not is removed."""
        try:
            sizes = json.loads((folder / "sizes.json").read_bytes())
            if all((folder / name).stat().st_size == size for name, size in sizes.items()):
                return True
        except (OSError, ValueError, AttributeError):
            pass
        shutil.rmtree(folder, ignore_errors=True)
        return False
