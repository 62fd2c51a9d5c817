"""How a memory does as a text grows: KL and the prefix's share of attention, by position in generated text.

ASM's claim is that what the prefix contributes fades as generated tokens pile up in local attention. Full attention
generates a continuation for each query; then both methods are run over the same tokens (teacher forced).
"""

from __future__ import annotations

from typing import Any

import torch

from kvexp.attention.function import Call
from kvexp.cache.dense import DenseLayer, State
from kvexp.tasks.batch import QueryBatch


class MassMeter:
    """Averages, over layers, heads and queries, the share of attention that goes to the first source."""

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None
        self.layers = 0

    def __call__(self, layer: DenseLayer, call: Call, before: list[State], local: State) -> None:
        """Observe one layer: the first source is the prefix."""
        everything = torch.stack([s for _, s in (*before, local)]).logsumexp(0)  # [B, H, T]
        share = (before[0][1] - everything).exp().mean((0, 1)).double()
        self.total = share if self.total is None else self.total + share
        self.layers += 1

    def mean(self) -> list[float]:
        """Return the share at each position."""
        assert self.total is not None
        return [round(float(x), 4) for x in self.total / self.layers]


def prefix_decay(full: QueryBatch, ours: QueryBatch, tokens: int) -> dict[str, Any]:
    """Return `kl`, `top1_agreement`, `mass_full` and `mass_method`, each a list over `tokens` positions.

    Both batches hold the same queries, `full` on the encoded context and `ours` under the method; needs the attached
    model. Position i is the i-th generated token's forward.
    """
    made, _ = full.generate(tokens, lambda ids: None)
    meters = MassMeter(), MassMeter()
    p, q = (
        batch.extend(made, observer=meter).log_softmax(-1)
        for batch, meter in zip((full, ours), meters, strict=True)
    )
    kl = (p.exp() * (p - q)).sum(-1).clamp(min=0).mean(0)
    agreement = (p.argmax(-1) == q.argmax(-1)).float().mean(0)
    return {
        "kl": [round(float(x), 4) for x in kl],
        "top1_agreement": [round(float(x), 4) for x in agreement],
        "mass_full": meters[0].mean(),
        "mass_method": meters[1].mean(),
        "queries": len(made),
    }
