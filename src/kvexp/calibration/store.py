"""Where calibration artefacts live: one folder for each fingerprint, built once and reused.

The fingerprint covers everything that decides what is in an artefact: model weights and dtype, the knobs that
matter, the context's and the traces' ids, budget and seed, and the version of the code that wrote it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from kvexp.files import file_lock
from kvexp.logs import rank

COLLECTED = "complete"  # a file that names the folders of all ranks once all samples are there

log = logging.getLogger(__name__)


def fingerprint(facts: dict[str, Any]) -> str:
    """Return 16 hex digits over the canonical JSON of `facts`."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def finish(folder: Path) -> list[Path]:
    """Mark the samples in `folder` as complete, and return the folders of the ranks in order."""
    parts = sorted(folder.glob("rank-*"))
    (folder / COLLECTED).write_text("\n".join(part.name for part in parts))
    return parts


def whole(folder: Path) -> bool:
    """Return whether `folder` holds complete samples, every file as long as it should be."""
    from kvexp.stats.samples import sound  # needs torch

    marker = folder / COLLECTED
    names = marker.read_text().split() if marker.exists() else []
    return bool(names) and all(sound(folder / name) for name in names)


class Store:
    """Artefacts under `root`, each in `<method>-<fingerprint>/`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @contextmanager
    def samples(self, facts: dict[str, Any], keep: bool) -> Iterator[Path]:
        """The folder of the samples that `facts` describe, the same for every rank.

        One cell at a time works in it; another that wants the same samples finds them there when they are
        kept. What is there whole stays; what was collected here is removed unless `keep`.
        """
        folder = self.root / f"samples-{fingerprint(facts)}"
        folder.mkdir(parents=True, exist_ok=True)
        if rank() > 0:  # rank 0 holds the lock and cleans up
            yield folder
            return
        with file_lock(self.root / f".{folder.name}.lock"):
            folder.mkdir(exist_ok=True)
            kept = whole(folder)
            if not kept:  # what a killed run left, or what was damaged since
                (folder / COLLECTED).unlink(missing_ok=True)
                for part in folder.glob("rank-*"):
                    shutil.rmtree(part)
            try:
                yield folder
            finally:
                if not keep and not kept:
                    (folder / COLLECTED).unlink(missing_ok=True)  # first: a kill from here on leaves a rest
                    shutil.rmtree(folder, ignore_errors=True)

    def get(
        self,
        name: str,
        facts: dict[str, Any],
        load: Callable[[Path, dict[str, Any]], Any],
        build: Callable[[], Any],
    ) -> tuple[Any, Path, bool]:
        """Return (artefact, its folder, whether it was built now).

        `build()` makes an artefact with `manifest` and `save(folder)`; `load(folder, facts)` reads one
        and refuses a mismatch. Two processes that want the same artefact build it once.
        """
        folder = self.root / f"{name}-{fingerprint(facts)}"
        folder.mkdir(parents=True, exist_ok=True)
        with (
            file_lock(folder / ".lock") if rank() == 0 else nullcontext()
        ):  # other ranks help rank 0 to build
            if (folder / "manifest.json").exists():
                log.info("using the memory in %s", folder)
                return load(folder, facts), folder, False
            artefact = build()
            artefact.manifest |= facts
            artefact.save(folder)
        return artefact, folder, True
