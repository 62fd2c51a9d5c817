"""How far a method's next-token distributions are from those of attention to everything."""

from __future__ import annotations

import torch


def divergence(full: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """Return KL(full || ours) in nats at each token, from log-probabilities [..., V]; never below 0."""
    return (full.exp() * (full - ours)).sum(-1).clamp(min=0)


def compared(full: torch.Tensor, ours: torch.Tensor) -> dict[str, float]:
    """Return the mean divergence and top-1 agreement over tokens, from log-probabilities [n, V]."""
    agreement = (full.argmax(-1) == ours.argmax(-1)).float().mean()
    return {"kl": float(divergence(full, ours).mean()), "top1_agreement": float(agreement)}
