"""How a memory does as a text grows: KL and the prefix's share of attention, by position in generated text.

ASM's claim is that what the prefix contributes fades as generated tokens pile up in local attention. Full
attention generates a continuation for each query; then both methods are run over the same tokens (teacher
forced).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from kvexp.attention.function import Call
from kvexp.cache.dense import DenseLayer
from kvexp.cache.source import State
from kvexp.tasks.batch import QueryBatch


class MassMeter:
    """Averages, over layers, heads and queries, the share of attention that goes to the first source."""

    def __init__(self) -> None:
        self.total: torch.Tensor | float = 0.0  # [T]
        self.seen = 0  # queries, once for each layer

    def __call__(self, layer: DenseLayer, call: Call, before: list[State], local: State) -> None:
        """Observe one layer: the first source is the prefix."""
        everything = torch.stack([s for _, s in (*before, local)]).logsumexp(0)  # [B, H, T]
        share = (before[0][1] - everything).exp().double()
        self.total = self.total + share.mean(1).sum(0)
        self.seen += len(share)

    def mean(self) -> torch.Tensor:
        """Return the share at each position, [T]."""
        return torch.as_tensor(self.total) / self.seen


def prefix_decay(batches: Iterable[tuple[QueryBatch, QueryBatch]], tokens: int) -> dict[str, Any]:
    """Return `kl`, `top1_agreement`, `mass_full` and `mass_method`, each a list over `tokens` positions.

    `batches` yields pairs that hold the same queries, first on the encoded context under full attention, then
    under the method, which is attached. Position i is the forward of the i-th generated token; figures are
    means over queries.
    """
    meters = MassMeter(), MassMeter()
    kl, agreement, queries = torch.zeros(tokens).double(), torch.zeros(tokens).double(), 0
    for full, ours in batches:
        made, _ = full.generate(tokens, lambda ids: None)
        p, q = (
            batch.extend(made, observer=meter).log_softmax(-1)
            for batch, meter in zip((full, ours), meters, strict=True)
        )
        kl += (p.exp() * (p - q)).sum(-1).clamp(min=0).double().sum(0).cpu()
        agreement += (p.argmax(-1) == q.argmax(-1)).double().sum(0).cpu()
        queries += len(made)
    return {
        "kl": _listed(kl / queries),
        "top1_agreement": _listed(agreement / queries),
        "mass_full": _listed(meters[0].mean()),
        "mass_method": _listed(meters[1].mean()),
        "queries": queries,
    }


def _listed(values: torch.Tensor) -> list[float]:
    return [round(float(value), 4) for value in values]
