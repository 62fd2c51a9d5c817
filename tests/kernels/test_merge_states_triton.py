"""The kernels that merge states equal the plain form."""

from __future__ import annotations

import pytest
import torch

from kvexp_kernels.merge_states import reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 0.016}


def state(*shape: int, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g).to(dtype), torch.randn(shape[:-1], generator=g) * 40


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 5, 20), (2, 2, 2, 2, 300)])
def test_two(device, poisoned, dtype, shape):
    from kvexp_kernels.merge_states import triton

    (a1, s1), (a2, s2) = (state(*shape, seed=i, dtype=dtype) for i in (1, 2))
    if len(shape) > 1:
        a1[0], s1[0] = torch.nan, -torch.inf  # a side without keys may hold anything
        a2[1], s2[1] = torch.nan, -torch.inf
    if len(shape) == 4:
        a1[1, 2], s1[1, 2], a2[1, 2], s2[1, 2] = torch.nan, -torch.inf, torch.nan, -torch.inf
    ours = triton.merge_states(*(x.to(device) for x in (a1, s1, a2, s2)))
    assert ours[0].dtype == dtype and ours[1].dtype == torch.float32
    want = reference.merge_states(a1, s1, a2, s2)
    torch.testing.assert_close(tuple(x.cpu() for x in ours), want, atol=TOLERANCE[dtype], rtol=1e-5)


def test_broadcast_strides_and_mixed_dtypes(device, poisoned):
    from kvexp_kernels.merge_states import triton

    a1, s1 = state(2, 5, 3, 8, seed=1, dtype=torch.float16)
    a2, s2 = state(1, 3, 1, 16, seed=2, dtype=torch.float32)
    a1, s1, a2 = a1.transpose(1, 2), s1.transpose(1, 2), a2[..., ::2]
    ours = triton.merge_states(*(x.to(device) for x in (a1, s1, a2, s2)))
    torch.testing.assert_close(
        tuple(x.cpu() for x in ours), reference.merge_states(a1, s1, a2, s2), atol=1e-5, rtol=1e-5
    )


def test_many(device, poisoned, dtype):
    from kvexp_kernels.merge_states import triton

    a, s = state(5, 2, 33, 20, seed=3, dtype=dtype)
    a[2, 1], s[2, 1] = torch.nan, -torch.inf
    s[:, 0, 7] = -torch.inf
    ours = triton.merge_many(a.to(device), s.to(device))
    want = reference.merge_many(a, s)
    torch.testing.assert_close(tuple(x.cpu() for x in ours), want, atol=TOLERANCE[dtype], rtol=1e-5)


def test_nothing_to_merge(device):
    from kvexp_kernels.merge_states import triton

    a, s = (x.to(device) for x in state(0, 4, 8, seed=1, dtype=torch.float32))
    assert [x.shape for x in triton.merge_states(a, s, a, s)] == [a.shape, s.shape]
    assert [x.shape for x in triton.merge_many(a[None], s[None])] == [a.shape, s.shape]
