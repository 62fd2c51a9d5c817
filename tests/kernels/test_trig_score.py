"""One dot product and the sizes of bands, against a sum over bands of complex numbers."""

from __future__ import annotations

import pytest
import torch

from kvexp_kernels.trig_score import Spread, trig_score

LAYOUTS = [(5, False, False), (5, True, True), (3, True, False), (4, False, True), (0, False, False)]


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def problem(bands: int, adjacent: bool, last: bool, squares: bool, batch: int = 2, dtype=torch.float32):
    keys = numbers(2, 2, 7, 10, seed=1, dtype=dtype)
    weights = numbers(batch, 6, 10 if squares else 10 - bands, seed=3)
    return keys, numbers(batch, 6, 10, seed=2), Spread(weights, bands, adjacent, last, squares)


def slow(keys: torch.Tensor, vectors: torch.Tensor, spread: Spread) -> torch.Tensor:
    """Number by number, in float64."""
    batch, heads, rows, width = keys.shape
    out = torch.zeros(batch, vectors.shape[1], rows, dtype=torch.float64)
    start = width - 2 * spread.bands if spread.last else 0
    pair = {}  # the band of a number that turns
    for f in range(spread.bands):
        both = (2 * f, 2 * f + 1) if spread.adjacent else (f, f + spread.bands)
        pair.update(dict.fromkeys([start + i for i in both], f))
    still = [d for d in range(width) if d not in pair]
    for b, q, r in torch.cartesian_prod(*(torch.arange(n) for n in out.shape)).tolist():
        key = keys[b, q // (vectors.shape[1] // heads), r].double()
        vector, weight = (x[min(b, len(x) - 1), q].double() for x in (vectors, spread.weights))
        total = key @ vector
        if spread.squares:
            total = total + key.square() @ weight
        else:
            for f in range(spread.bands):
                total = total + weight[f] * key[[d for d, band in pair.items() if band == f]].norm()
            for j, d in enumerate(still):
                total = total + weight[spread.bands + j] * key[d].abs()
        out[b, q, r] = total
    return out


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, squares):
    keys, vectors, spread = problem(*layout, squares)
    torch.testing.assert_close(trig_score(keys.double(), vectors, spread), slow(keys, vectors, spread))
    torch.testing.assert_close(
        trig_score(keys, vectors), (keys.repeat_interleave(3, 1) @ vectors[..., None])[..., 0]
    )


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernel(device, poisoned, layout, squares, dtype):
    from kvexp_kernels.trig_score import triton

    keys, vectors, spread = problem(*layout, squares, batch=1, dtype=dtype)
    want = slow(keys, vectors, spread)
    moved = Spread(spread.weights.to(device), *layout, squares)
    ours = triton.trig_score(keys.to(device), vectors.to(device).double(), moved)
    torch.testing.assert_close(ours.double().cpu(), want, atol=1e-5, rtol=1e-5)


def test_kernel_without_spread_on_strided_keys(device, poisoned):
    from kvexp_kernels.trig_score import triton

    keys, vectors = numbers(1, 70, 2, 24, seed=1).transpose(1, 2), numbers(1, 4, 24, seed=2)
    want = trig_score(keys, vectors)
    torch.testing.assert_close(triton.trig_score(keys.to(device), vectors.to(device)).cpu(), want)
    assert triton.trig_score(keys[:, :, :0].to(device), vectors.to(device)).shape == (1, 4, 0)
