"""Nearest centroid of every row, in bounded memory, by torch or FAISS."""

from __future__ import annotations

import importlib.util

import numpy as np
import torch
from torch import Tensor

from kvexp.errors import UserError, suggest

METRICS = ("l2", "cosine")
BACKENDS = ("auto", "torch", "faiss")
SCORE_BYTES = 4 << 20  # scores of one chunk stay in the second-level cache of a CPU core


def assign(x: Tensor, centroids: Tensor, metric: str = "l2", backend: str = "auto") -> Tensor:
    """Return for each row of `x [n, d]` the number `[n]` int64 of the nearest of `centroids [k, d]`.

    `metric` is "l2" or "cosine" (the centroids are normalised here, the length of x does not matter). Equal
    distances go to the lower number. `backend="auto"` takes FAISS for float32 on the CPU where it is
    installed (as fast as torch or faster, see scripts/bench_kmeans.py), else torch. Raises UserError for
    FAISS without the package or with other tensors.
    """
    check_choice("metric", metric, METRICS)
    if metric == "cosine":
        centroids = unit(centroids)
    if _use_faiss(x, backend):
        return _faiss_nearest(x, centroids, metric)
    rows = max(1, SCORE_BYTES // (len(centroids) * x.element_size()))
    return torch.cat([_torch_nearest(part, centroids, metric) for part in x.split(rows)])


def unit(x: Tensor) -> Tensor:
    """Divide each row by its length; a zero row stays zero."""
    return x / x.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)


def check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise UserError when `value` is none of the choices."""
    if value not in choices:
        raise UserError(f"{what} is one of {', '.join(choices)}, not '{value}'{suggest(value, choices)}")


def _use_faiss(x: Tensor, backend: str) -> bool:
    check_choice("k-means backend", backend, BACKENDS)
    fits = x.device.type == "cpu" and x.dtype == torch.float32
    if backend == "faiss" and not fits:
        raise UserError(f"the faiss backend takes float32 on the CPU, not {x.dtype} on {x.device}: use torch")
    installed = backend != "torch" and importlib.util.find_spec("faiss") is not None
    if backend == "faiss" and not installed:
        raise UserError("the faiss backend needs the package faiss-cpu: install it, or use the torch backend")
    return installed and fits


def _torch_nearest(x: Tensor, centroids: Tensor, metric: str) -> Tensor:
    """Nearest by the largest of x.c (cosine) or of x.c - |c|^2 / 2 (L2: |x|^2 is the same for every c)."""
    if metric == "cosine":
        return (x @ centroids.T).max(dim=1).indices
    half = centroids.square().sum(dim=1) / 2
    return torch.addmm(half, x, centroids.T, beta=-1).max(dim=1).indices


def _faiss_nearest(x: Tensor, centroids: Tensor, metric: str) -> Tensor:
    import faiss  # optional, and slow to import

    kind = faiss.METRIC_INNER_PRODUCT if metric == "cosine" else faiss.METRIC_L2
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(torch.get_num_threads())
    try:
        rows, keys = (np.ascontiguousarray(t.detach().numpy()) for t in (x, centroids))
        _, index = faiss.knn(rows, keys, 1, metric=kind)
    finally:
        faiss.omp_set_num_threads(before)
    return torch.from_numpy(index[:, 0])
