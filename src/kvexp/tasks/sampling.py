"""Choosing tokens at random: temperature and top-p, reproducible for each sample whatever the batch."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch


class Sampler:
    """Draws one token a row; row b follows the random stream that `streams[b]` names.

    `temperature` divides the logits, `top_p` keeps the fewest tokens whose probabilities sum to at least
    that (nucleus sampling: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020, arXiv
    1904.09751). A draw is the inverse of the cumulative distribution at one uniform number of the stream, so
    the other rows of a batch have no part in it.
    """

    def __init__(self, streams: Sequence[str], temperature: float, top_p: float) -> None:
        self.streams = [random.Random(name) for name in streams]
        self.temperature, self.top_p = temperature, top_p

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a token [B] for each row of logits [B, V]."""
        probabilities = (logits.float() / self.temperature).softmax(-1)
        ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
        mass = ordered.cumsum(-1)
        ordered = ordered.masked_fill(mass - ordered >= self.top_p, 0.0)  # the first token always stays
        mass = ordered.cumsum(-1)
        drawn = torch.tensor([[stream.random()] for stream in self.streams], device=logits.device)
        place = (mass <= drawn * mass[:, -1:]).sum(-1, keepdim=True)
        last = (ordered > 0).sum(-1, keepdim=True) - 1  # a number that float32 rounds to 1 draws this one
        place = place.minimum(last)
        return ids.gather(-1, place)[:, 0]
