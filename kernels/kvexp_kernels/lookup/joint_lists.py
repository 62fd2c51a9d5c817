"""Two-level lookup in all codebooks of a layer by one call of FAISS.

For a step of decoding, what a call costs exceeds what it reads. So the inverted lists of all codebooks stand
in one index: the cells of each query are chosen by one product with the centres of its own codebook, FAISS
scans the lists that it is told to, in half precision, and what it finds best is compared once more with the
keys themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvexp_kernels.lookup.cell_lists import CellLists
from kvexp_kernels.lookup.lists import COMPARED, FEW, view
from kvexp_kernels.lookup.two_level import TwoLevelIndex


class JointLists:
    """The cells of C indices over float32 keys `[C, K, d]` (in order of entries) on the CPU; these are not
    copied. Where codebooks have different numbers of cells, the others are filled up with empty ones.

    Raises ImportError without FAISS.
    """

    def __init__(self, indices: Sequence[TwoLevelIndex], keys: Tensor) -> None:
        import faiss  # optional, and slow to import

        books, entries, width = keys.shape
        self._faiss: Any = faiss
        self._keys = keys.flatten(0, 1).numpy()
        self.cells = max(len(index.centres) for index in indices)
        self._centres = np.zeros((books, self.cells, width), np.float32)
        self._offset = np.arange(books)[:, None, None] * self.cells  # of a codebook's lists among all
        self._first = np.arange(books)[:, None] * entries  # and of its entries
        self._held = [len(index.centres) for index in indices]
        self._short = [book for book, held in enumerate(self._held) if held < self.cells]
        self._quantiser = faiss.IndexFlatIP(width)  # asked nothing: lists are named by the caller
        half, product = faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
        total = books * self.cells
        self._lists: Any = faiss.IndexIVFScalarQuantizer(self._quantiser, width, total, half, product, False)
        self._lists.is_trained = True
        for book, index in enumerate(indices):
            self._centres[book, : len(index.centres)] = index.centres.numpy()
            held = book * self.cells + np.repeat(np.arange(len(index.centres)), np.diff(index.offsets))
            arrays = (index.keys.numpy(), index.entries.numpy() + book * entries, held)
            self._lists.add_core(entries, *(faiss.swig_ptr(array) for array in arrays))
        self.centres = torch.from_numpy(self._centres)

    def tensors(self) -> list[Tensor]:
        """Views of what is held: centres, and each cell's keys in half precision and entry numbers."""
        return [self.centres, *self._views(self._codes), *self._views(self._ids)]

    def cell_lists(self) -> CellLists:
        """Views of the cells, without those that fill up."""
        centres = [self.centres[book, :held] for book, held in enumerate(self._held)]
        base = len(self._keys) // len(self._held)
        return CellLists(centres, self._views(self._codes), self._views(self._ids), base)

    def _views(self, of: Callable[[int, int], Tensor]) -> list[Tensor]:
        sizes = [self._lists.invlists.list_size(cell) for cell in range(self._lists.nlist)]
        return [of(cell, size) for cell, size in enumerate(sizes) if size]

    def _codes(self, cell: int, size: int) -> Tensor:
        shape = size, 2 * self._lists.d
        return view(self._faiss, self._lists.invlists.get_codes(cell), shape).view(torch.float16)

    def _ids(self, cell: int, size: int) -> Tensor:
        return view(self._faiss, self._lists.invlists.get_ids(cell), (size,))

    def search(self, x: Tensor, probe: int = 16) -> tuple[Tensor, int]:
        """Find for each query of `x [C, n, d]` the best key among its `probe` best cells of its codebook.

        Returns `(index [C, n], scored)` as `TwoLevelIndex.search` does, of all codebooks together; keys
        compared again are not counted. Equal scores go to the lower entry number.
        """
        rows = np.ascontiguousarray(x.detach().numpy(), dtype=np.float32)
        books, count, width = rows.shape
        probe = min(probe, self.cells)
        near = rows @ self._centres.transpose(0, 2, 1)  # [C, n, M]
        for book in self._short:
            near[book, :, self._held[book] :] = -np.inf
        chosen = np.argpartition(near, -probe, axis=-1)[..., -probe:] + self._offset
        flat, chosen = rows.reshape(-1, width), chosen.reshape(-1, probe)
        stats: Any = self._faiss.cvar.indexIVF_stats
        before = stats.ndis
        score, entry = self._scan(flat, chosen, COMPARED)
        scored = stats.ndis - before + count * sum(self._held)
        found = self._best(flat, entry)
        if (tied := score[:, 0] == score[:, -1]).any():  # there may be more of them
            every = self._scan(flat[tied], chosen[tied], len(self._keys) // books)[1]
            found[tied] = self._best(flat[tied], every)
        found = (found.reshape(books, count) - self._first).clip(0, len(self._keys) // books - 1)
        return torch.from_numpy(found), scored

    def _scan(self, rows: np.ndarray, chosen: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        self._lists.nprobe = chosen.shape[1]
        before = self._faiss.omp_get_max_threads()
        wanted = 1 if len(rows) <= FEW else torch.get_num_threads()
        if wanted == before:
            return self._lists.search_preassigned(rows, count, chosen, None)
        self._faiss.omp_set_num_threads(wanted)
        try:
            return self._lists.search_preassigned(rows, count, chosen, None)
        finally:
            self._faiss.omp_set_num_threads(before)

    def _best(self, rows: np.ndarray, entry: np.ndarray) -> np.ndarray:
        """The best of the entries `[n, m]` by the keys themselves; -1 stands for none."""
        score = np.matmul(self._keys[entry], rows[:, :, None])[..., 0]
        score[entry < 0] = -np.inf
        entry = np.where(score == score.max(axis=1, keepdims=True), entry, len(self._keys) - 1)
        return entry.min(axis=1)
