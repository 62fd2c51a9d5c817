"""How far a method's next-token distributions are from those of attention to everything."""

from __future__ import annotations

import torch

ROWS = 16  # tokens compared at once: what they need of a vocabulary fits into a processor's cache


def token_scores(full: torch.Tensor, ours: torch.Tensor, following: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compare logits [n, V] at each of n tokens, whose next one is `following` [n].

    Returns, each [n] float32: `nll` and `nll_full` of the next token in nats, `kl` (full || ours), and
    `top1_agreement`, 0 or 1.
    """
    parts = [
        _scored(f.float(), o.float(), t)
        for f, o, t in zip(full.split(ROWS), ours.split(ROWS), following.split(ROWS), strict=True)
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _scored(full: torch.Tensor, ours: torch.Tensor, following: torch.Tensor) -> dict[str, torch.Tensor]:
    mass_full, mass = full.logsumexp(-1), ours.logsumexp(-1)
    share = (full - mass_full[:, None]).exp_()
    gap = (share * (full - ours)).sum(-1) - mass_full + mass
    index = following[:, None]
    return {
        "nll": mass - ours.gather(-1, index)[:, 0],
        "nll_full": mass_full - full.gather(-1, index)[:, 0],
        "kl": gap.clamp(min=0),
        "top1_agreement": (ours.argmax(-1) == full.argmax(-1)).float(),
    }


def divergence(full: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """Return KL(full || ours) in nats at each token, from log-probabilities [..., V]; never below 0."""
    return (full.exp() * (full - ours)).sum(-1).clamp(min=0)


def compared(full: torch.Tensor, ours: torch.Tensor) -> dict[str, float]:
    """Return the mean divergence and top-1 agreement over tokens, from log-probabilities [n, V]."""
    agreement = (full.argmax(-1) == ours.argmax(-1)).float().mean()
    return {"kl": float(divergence(full, ours).mean()), "top1_agreement": float(agreement)}
