"""Whitening of queries before lookup, per head: q <- Sigma^(-1/2) q ("whitening" of Attention-State Memory).

Sigma is the covariance of a head's queries, from a random subset of the samples, shrunk to Sigma + eps I
since the queries of a head nearly fill a few directions only. The symmetric root commutes with a rotation
common to all queries: keys before rotary embedding and keys rotated at one position give the same lookup.
"""

from __future__ import annotations

import torch
from torch import Tensor

SHRINK = 1e-3


def whitening_matrix(q: Tensor, shrink: float = SHRINK, diagonal: bool = False) -> Tensor:
    """Return the symmetric `W [h, d, d]` float64 with W Sigma' W = I, from queries `q [n, h, d]`.

    Sigma' = Sigma + eps I, with eps = `shrink` times the mean variance of the head's components.
    `diagonal=True` uses the variances alone, which is not invariant to rotation. A head whose queries never
    vary gets the identity. Raises ValueError for fewer than two queries.
    """
    if len(q) < 2:
        raise ValueError(f"whitening needs at least two queries, not {len(q)}")
    centred = q.double() - q.double().mean(dim=0)
    covariance = torch.einsum("nhi,nhj->hij", centred, centred) / (len(q) - 1)
    variance = covariance.diagonal(dim1=1, dim2=2)
    mean = variance.mean(dim=1, keepdim=True)
    eps = torch.where(mean > 0, shrink * mean, 1.0)
    if diagonal:
        return torch.diag_embed((variance + eps).rsqrt())
    values, vectors = torch.linalg.eigh(covariance)
    # Rounding may leave eigenvalues slightly below zero.
    return vectors * (values.clamp(min=0) + eps).rsqrt().unsqueeze(1) @ vectors.transpose(1, 2)


def whiten(q: Tensor, matrix: Tensor) -> Tensor:
    """Apply `matrix [h, d, d]` to queries `q [..., h, d]`, head by head; the dtype of q is kept."""
    return torch.einsum("...hi,hij->...hj", q, matrix.to(q.dtype))
