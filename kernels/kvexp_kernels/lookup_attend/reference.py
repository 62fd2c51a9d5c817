"""One decoding step of a layer that stands on a memory: lookup, attention to local rows, merge.

Source: "Context Memorization for Efficient Long Context Generation" (attention-state memory, ASM). As in
`lookup_merge`, queries come whitened and corrections of a state are the caller's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp_kernels.lookup_merge.reference import Entries, lookup_merge


def lookup_attend(
    x: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, entries: Entries, head_of: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend with one token of each sequence to its local rows and to the entry that it looks up.

    `x [C, B n, d]`: what is looked up, n samples of each token for each of C codebooks, token-major;
    `head_of [C, n, h]` int64: the query head of each of a sample's h heads, every query head once.
    `query [B, Hq, D]`, `key [B, Hkv, S, D]`, `value [B, Hkv, S, Dv]`: attention to local rows, all of which
    are visible. Returns `(a [B, Hq, Dv], s [B, Hq], index [C, B n])`: the merged state, as `lookup_merge`
    does, and the entries found.
    """
    (batch, heads, width), kv = query.shape, key.shape[1]
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    folded = query.view(batch, kv, heads // kv, width).to(work)
    scores = folded @ key.to(work).mT * scale  # [B, Hkv, G, S]
    local_s = scores.logsumexp(-1).view(batch, heads)
    local_a = (scores.softmax(-1) @ value.to(work)).view(batch, heads, -1)
    books, samples, each = head_of.shape
    flat = head_of.flatten()

    def of_samples(t: Tensor) -> Tensor:
        """[B, Hq, ...] -> [C, B n, h, ...]."""
        return t[:, flat].unflatten(1, (books, samples, each)).transpose(0, 1).flatten(1, 2)

    a, s, index = lookup_merge(x, entries, of_samples(local_a), of_samples(local_s))

    def of_heads(t: Tensor) -> Tensor:
        back = t.unflatten(1, (batch, samples)).transpose(0, 1).flatten(1, 3)
        return back[:, flat.argsort()]

    return of_heads(a).to(query.dtype), of_heads(s), index
