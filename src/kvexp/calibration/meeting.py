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
    """The shares of a crew: one a rank. No name is written twice: network file systems remember names."""

    def __init__(self, folder: Path, crew: Crew) -> None:
        """`folder` is theirs alone; what a killed run left in it goes."""
        self.number, self.count = crew.rank, crew.world
        self._folder, self._crew, self._turn = folder, crew, 0
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
        self._crew.barrier()
        if not self.number:  # all have read it
            for path in self._folder.glob(f"*-{self._turn}.safetensors"):
                path.unlink()
        self._turn += 1
        return found

    def _write(self, name: str, tensors: Tensors) -> None:
        cpu = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        write_atomic(self._path(name), save(cpu))

    def _read(self, name: str) -> Tensors:
        return load(self._path(name).read_bytes())

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}-{self._turn}.safetensors"
