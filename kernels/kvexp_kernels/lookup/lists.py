"""Two-level lookup by FAISS: the cells of `TwoLevelIndex`, held as inverted lists and scanned in place.

For the few queries of a decoding step, a call costs some microseconds where a loop over slices in Python
costs some for each cell. Lookup is bound by the bytes that it reads, so lists hold keys in half precision;
what they find best is compared once more with the keys themselves. FAISS is optional: without it, or for
other than float32 on a CPU, `TwoLevelIndex` searches the same cells.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvexp_kernels.lookup.two_level import TwoLevelIndex

FEW = 64  # queries for which threads cost more than they save
COMPARED = 8  # keys that are compared again; half precision moves a cosine by up to 5e-4


class InvertedLists:
    """The cells of an index over float32 keys `[K, d]` (in order of entries) on the CPU; keys are not copied.

    centres `[cells, d]` is a view of what FAISS reads. Raises ImportError without FAISS.
    """

    def __init__(self, index: TwoLevelIndex, keys: Tensor) -> None:
        import faiss  # optional, and slow to import

        cells, width = index.centres.shape
        self._faiss: Any = faiss
        self._keys = keys.numpy()
        self._quantiser = faiss.IndexFlatIP(width)
        self._quantiser.add(index.centres.numpy())
        half, product = faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
        self._lists: Any = faiss.IndexIVFScalarQuantizer(self._quantiser, width, cells, half, product, False)
        self._lists.is_trained = True
        held = np.repeat(np.arange(cells), np.diff(index.offsets))
        arrays = (index.keys.numpy(), index.entries.numpy(), held)
        # Into the cells of the index, and not into those that FAISS would find.
        self._lists.add_core(len(keys), *(faiss.swig_ptr(array) for array in arrays))
        self.centres = view(faiss, self._quantiser.get_xb(), (cells, width))

    @staticmethod
    def suits(keys: Tensor) -> bool:
        """Whether keys can be held so, here."""
        fits = keys.device.type == "cpu" and keys.dtype == torch.float32
        return fits and importlib.util.find_spec("faiss") is not None

    def tensors(self) -> list[Tensor]:
        """Views of what FAISS holds: centres, and each cell's keys in half precision and entry numbers."""
        lists, width, held = self._lists.invlists, self._lists.d, [self.centres]
        for cell in range(self._lists.nlist):
            size = lists.list_size(cell)
            held.append(view(self._faiss, lists.get_codes(cell), (size, 2 * width)).view(torch.float16))
            held.append(view(self._faiss, lists.get_ids(cell), (size,)))
        return held

    def search(self, x: Tensor, probe: int = 16) -> tuple[Tensor, int]:
        """Find for each query of `x [n, d]` the best key among its `probe` best cells.

        Returns `(index, scored)` as `TwoLevelIndex.search` does; keys compared again are not counted.
        Equal scores go to the lower entry number. Another key may be found only where half precision puts
        `COMPARED` others before the best one, all within 1e-3 of its cosine.
        """
        rows = np.ascontiguousarray(x.detach().numpy(), dtype=np.float32)
        stats: Any = self._faiss.cvar.indexIVF_stats
        before, self._lists.nprobe = stats.ndis, min(probe, self._lists.nlist)
        score, entry = self._nearest(rows, COMPARED)
        scored = stats.ndis - before + len(rows) * self._lists.nlist
        found = self._best(rows, entry)
        if (tied := score[:, 0] == score[:, -1]).any():  # there may be more of them
            found[tied] = self._best(rows[tied], self._nearest(rows[tied], self._lists.ntotal)[1])
        return torch.from_numpy(found), scored

    def _best(self, rows: np.ndarray, entry: np.ndarray) -> np.ndarray:
        """The best of the entries `[n, m]` by the keys themselves; -1 stands for none."""
        score = np.matmul(self._keys[entry], rows[:, :, None])[..., 0]
        score[entry < 0] = -np.inf
        entry = np.where(score == score.max(axis=1, keepdims=True), entry, len(self._keys) - 1)
        return entry.min(axis=1).clip(min=0)

    def _nearest(self, rows: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        before = self._faiss.omp_get_max_threads()
        self._faiss.omp_set_num_threads(1 if len(rows) <= FEW else torch.get_num_threads())
        try:
            return self._lists.search(rows, count)
        finally:
            self._faiss.omp_set_num_threads(before)


def view(faiss: Any, pointer: Any, shape: tuple[int, ...]) -> Tensor:
    """The memory behind a pointer of FAISS as a tensor, not copied."""
    return torch.from_numpy(faiss.rev_swig_ptr(pointer, int(np.prod(shape)))).view(shape)
