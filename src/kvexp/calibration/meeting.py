"""Shares of a stream whose sums meet in files: the processes of a crew see one folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load, save

from kvexp.crew.crew import Crew
from kvexp.files import write_atomic
from kvexp.stats.shares import S, Shares, Tensors


class Meeting(Shares):
    """The shares of a crew: one a rank."""

    def __init__(self, folder: Path, crew: Crew) -> None:
        """`folder` is theirs alone; what a killed run left in it goes."""
        self.number, self.count = crew.rank, crew.world
        self._folder, self._crew = folder, crew
        if crew.first:
            shutil.rmtree(folder, ignore_errors=True)
        crew.barrier()

    def total(self, mine: S) -> S:
        """See `Shares.total`; the first rank merges, in the order of ranks."""
        if self.number:
            self._write(f"share-{self.number}", mine.state())
        self._crew.barrier()

        def whole() -> Tensors:
            for rank in range(1, self.count):
                mine.merge(mine.restored(self._read(f"share-{rank}")))
            return mine.state()

        return mine.restored(self.once(whole))

    def once(self, make: Callable[[], Tensors]) -> Tensors:
        """See `Shares.once`."""
        if not self.number:
            self._write("whole", make())
        self._crew.barrier()
        found = self._read("whole")
        self._crew.barrier()  # all have read it: the next may take its place
        return found

    def _write(self, name: str, tensors: Tensors) -> None:
        cpu = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        write_atomic(self._folder / f"{name}.safetensors", save(cpu))

    def _read(self, name: str) -> Tensors:
        return load((self._folder / f"{name}.safetensors").read_bytes())
