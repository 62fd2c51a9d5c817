"""Learned sinks: a logit of each query head that stands in every softmax of a model, and for no row.

With lse the log-sum-exp of a query's logits over rows, rows keep exp(lse) / (exp(lse) + exp(sink)) of the
mass. A softmax over a part of the rows needs no sink: it is the model's weights of the part divided by their
sum, in which the sink cancels.
"""

from __future__ import annotations

import torch


def kept(lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the share of the mass that stays with rows, [B, H, T], of lse [B, H, T] and sinks [H]."""
    return torch.sigmoid(lse - sinks.to(lse.dtype)[None, :, None])


def joined(lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the log-sum-exp [B, H, T] of rows and sinks [H]; `lse` itself where there is no sink."""
    return lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])


def softmax(logits: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the weights [B, H, T, S] that rows get beside sinks [H]; 0 for a query that sees no row."""
    weights = logits.softmax(-1).nan_to_num(0.0)
    return weights if sinks is None else weights * kept(logits.logsumexp(-1), sinks)[..., None]
