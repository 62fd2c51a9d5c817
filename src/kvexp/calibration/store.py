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

from kvexp.crew.crew import ALONE, Crew
from kvexp.files import file_lock, remove_leftovers

WORK = "work"  # in the folder of an artefact that is being built
KEPT = "kept"  # in a folder of samples that a run was asked to leave

log = logging.getLogger(__name__)


def fingerprint(facts: dict[str, Any]) -> str:
    """Return 16 hex digits over the canonical JSON of `facts`."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Store:
    """Artefacts under `root`, each in `<method>-<fingerprint>/`; every rank of a crew asks for the same ones.

    Rank 0 holds the locks and decides, the others follow.
    """

    def __init__(self, root: Path, crew: Crew = ALONE) -> None:
        self.root, self.crew = root, crew

    @contextmanager
    def samples(self, facts: dict[str, Any], keep: bool) -> Iterator[Path]:
        """The folder of the samples that `facts` describe, the same for every rank.

        One cell at a time works in it; another that wants the same samples finds them there when they are
        kept. After an exception what was collected stays for the next start.
        """
        folder = self.root / f"samples-{fingerprint(facts)}"
        with self._locked(self.root / f".{folder.name}.lock"):
            if self.crew.first:
                folder.mkdir(parents=True, exist_ok=True)
            self.crew.barrier()
            try:
                yield folder
            except BaseException:
                if self.crew.first and not any(folder.iterdir()):
                    folder.rmdir()
                elif self.crew.first:
                    log.warning(
                        "what was collected stays in %s, and the same command goes on with it", folder
                    )
                raise
            self.crew.barrier()  # nobody reads any more
            if self.crew.first and keep:
                (folder / KEPT).touch()
            elif self.crew.first and not (folder / KEPT).exists():
                shutil.rmtree(folder, ignore_errors=True)

    def get(
        self,
        name: str,
        facts: dict[str, Any],
        load: Callable[[Path, dict[str, Any]], Any],
        build: Callable[[Path], Any],
        say: Callable[..., None] = log.info,
    ) -> tuple[Any, Path, bool]:
        """Return (artefact, its folder, whether it was built now).

        `build(work)` makes an artefact with `manifest` and `save(folder)`; what it leaves in the folder
        `work` is there again when it is interrupted, and goes when it is done. `load(folder, facts)` reads an
        artefact and refuses a mismatch. Two processes that want the same artefact build it once. `say` logs
        that it was there.
        """
        folder = self.root / f"{name}-{fingerprint(facts)}"
        with self._locked(folder / ".lock"):
            if self.crew.broadcast((folder / "manifest.json").exists()):
                say("using the memory in %s", folder)
                return load(folder, facts), folder, False
            if self.crew.first:
                remove_leftovers(folder)
            artefact = build(folder / WORK)
            artefact.manifest |= facts
            if self.crew.first:
                artefact.save(folder)
                shutil.rmtree(folder / WORK, ignore_errors=True)
            self.crew.barrier()
        return artefact, folder, True

    def _locked(self, path: Path) -> Any:
        return file_lock(path) if self.crew.first else nullcontext()
