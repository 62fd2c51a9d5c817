"""Whitening makes covariances the identity and respects common rotations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvexp.stats.whiten import whiten, whitening_matrix


def queries(n: int = 4000, d: int = 6) -> Tensor:
    """Correlated queries of two heads with an offset, float64."""
    g = torch.Generator().manual_seed(0)
    mix = torch.randn(2, d, d, generator=g, dtype=torch.float64)
    return torch.einsum("nhi,hij->nhj", torch.randn(n, 2, d, generator=g, dtype=torch.float64), mix) + 5


def covariance(q: Tensor) -> Tensor:
    return torch.stack([torch.cov(q[:, h].T) for h in range(q.shape[1])])


def cosines(q: Tensor) -> Tensor:
    unit = q[:200] / q[:200].norm(dim=-1, keepdim=True)
    return torch.einsum("nhd,mhd->hnm", unit, unit)


def rotation(d: int = 6) -> Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.linalg.qr(torch.randn(2, d, d, generator=g, dtype=torch.float64)).Q


def test_covariance_becomes_the_identity():
    q = queries()
    white = covariance(whiten(q, whitening_matrix(q, shrink=0)))
    torch.testing.assert_close(white, torch.eye(6, dtype=torch.float64).expand(2, 6, 6), rtol=0, atol=1e-10)


def test_shrinking_solves_for_the_shrunk_covariance():
    q = queries()
    sigma, w = covariance(q), whitening_matrix(q, shrink=0.01)
    shrunk = sigma + 0.01 * sigma.diagonal(dim1=1, dim2=2).mean(1).view(2, 1, 1) * torch.eye(6)
    identity = torch.eye(6, dtype=torch.float64).expand(2, 6, 6)
    torch.testing.assert_close(w @ shrunk @ w, identity, rtol=0, atol=1e-10)
    torch.testing.assert_close(w, w.transpose(1, 2))


def test_diagonal_gives_unit_variances_only():
    q = queries()
    white = covariance(whiten(q, whitening_matrix(q, shrink=0, diagonal=True)))
    torch.testing.assert_close(white.diagonal(dim1=1, dim2=2), torch.ones(2, 6, dtype=torch.float64))
    assert (white - torch.eye(6)).abs().max() > 0.1


def test_a_common_rotation_changes_lookup_only_with_diagonal_whitening():
    q = queries()
    turned = torch.einsum("nhi,hij->nhj", q, rotation())
    full = [cosines(whiten(x, whitening_matrix(x))) for x in (q, turned)]
    torch.testing.assert_close(full[0], full[1], rtol=0, atol=1e-9)
    diagonal = [cosines(whiten(x, whitening_matrix(x, diagonal=True))) for x in (q, turned)]
    assert (diagonal[0] - diagonal[1]).abs().max() > 0.05


def test_heads_without_variance_and_low_rank_stay_finite():
    q = queries(50).float()
    q[:, 0] = 3.0
    q[:, 1, 2:] = 0.0
    w = whitening_matrix(q)
    torch.testing.assert_close(w[0], torch.eye(6, dtype=torch.float64))
    assert torch.isfinite(w).all() and whiten(q, w).dtype == torch.float32
    with pytest.raises(ValueError, match="two queries"):
        whitening_matrix(q[:1])
