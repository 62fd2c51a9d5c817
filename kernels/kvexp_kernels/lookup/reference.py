"""Exact lookup: every query against every key (Attention-State Memory's retrieval, cosine top 1)."""

from __future__ import annotations

import torch
from torch import Tensor

SCORE_BYTES = 64 << 20  # scores of one chunk of queries, all codebooks together


def lookup_flat(x: Tensor, keys: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Find the best key of each query, in each of C codebooks.

    `x`: `[C, n, d]` queries of any length; `keys`: `[C, K, d]` unit vectors, or int8 with one `scale [C, K]`
    for each key (key = scale * int8, see `quantise_keys`). Returns `(index, score)`, both `[C, n]`: the int64
    number of the key with the largest dot product, and that product. The length of a query does not change
    which key wins, so this is the largest cosine; score / |x| is its value. Equal scores go to the lower
    number. Products are formed in float32, or in float64 where x is float64; scores are held for a chunk of
    queries at a time.
    """
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    matrix = keys.to(work).transpose(1, 2)
    if scale is not None:
        matrix = matrix * scale.to(work).unsqueeze(1)
    rows = max(1, SCORE_BYTES // (keys.shape[0] * keys.shape[1] * matrix.element_size()))
    found = [torch.bmm(part.to(work), matrix).max(dim=-1) for part in x.split(rows, dim=1)]
    return torch.cat([f.indices for f in found], dim=1), torch.cat([f.values for f in found], dim=1)


def quantise_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Round `keys [C, K, d]` to int8 with one float32 scale per key: `(int8 [C, K, d], scale [C, K])`.

    Symmetric: scale = max |key| / 127, so that the largest component becomes 127. Departs from the paper,
    which stores keys in the model's dtype.
    """
    scale = keys.float().abs().amax(dim=-1) / 127
    whole = keys.float() / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    return whole.round().to(torch.int8), scale
