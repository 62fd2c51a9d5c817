"""Attention over rows end to end equals one softmax a head; the kernel equals the plain form."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvexp_kernels.ragged_attend import ragged_attend

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 0.032}


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def spans(lengths: list[list[int]], gap: int = 0) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Starts and lengths of heads end to end, `gap` rows apart, and how many rows there are."""
    held = torch.tensor(lengths)
    ends = (held.flatten() + gap).cumsum(0)
    return (ends - held.flatten() - gap).view_as(held), held, int(ends[-1])


def slow(query, keys, values, starts, lengths, scale):
    """One softmax for each query."""
    a = torch.zeros(*query.shape[:3], values.shape[-1], dtype=torch.float64)
    s = torch.full(query.shape[:3], -math.inf, dtype=torch.float64)
    group = query.shape[1] // starts.shape[1]
    for b, h, t in torch.cartesian_prod(*(torch.arange(n) for n in query.shape[:3])).tolist():
        of = min(b, len(starts) - 1), h // group
        rows = slice(int(starts[of]), int(starts[of] + lengths[of]))
        if lengths[of]:
            scores = keys[rows].double() @ query[b, h, t].double() * scale
            a[b, h, t], s[b, h, t] = scores.softmax(0) @ values[rows].double(), scores.logsumexp(0)
    return a, s


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2), min_size=1, max_size=3),
    batch=st.integers(1, 3),
    length=st.integers(1, 3),
    gap=st.integers(0, 2),
)
def test_equals_one_softmax_a_head(lengths, batch, length, gap):
    batch = batch if len(lengths) == 1 else len(lengths)
    starts, held, rows = spans(lengths, gap)
    query = numbers(batch, 4, length, 6, seed=1, dtype=torch.float64)
    keys, values = numbers(rows, 6, seed=2).double(), numbers(rows, 3, seed=3).double()
    ours = ragged_attend(query, keys, values, starts, held, 0.7)
    torch.testing.assert_close(ours, slow(query, keys, values, starts, held, 0.7), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("parts", [1, 3])
def test_kernel(device, poisoned, dtype, parts):
    from kvexp_kernels.ragged_attend import triton

    starts, held, rows = spans([[130, 0], [1, 33]], gap=2)
    query, keys = numbers(2, 6, 1, 20, seed=1, dtype=dtype), numbers(rows, 20, seed=2, dtype=dtype)
    values = numbers(rows, 12, seed=3, dtype=dtype)
    keys[130:132], values[130:132] = torch.nan, torch.nan  # room behind a head's rows
    want = slow(query, keys, values, starts, held, 0.5)
    given = (x.to(device) for x in (query, keys, values, starts, held))
    a, s = triton.ragged_attend(*given, 0.5, longest=130, parts=parts)
    assert (a.dtype, s.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(a.double().cpu(), want[0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(s.double().cpu(), want[1], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert not a[0, 3:].any() and torch.isneginf(s[0, 3:]).all(), "a head without rows"


def test_kernel_with_rows_that_serve_the_whole_batch_and_strides(device, poisoned):
    from kvexp_kernels.ragged_attend import triton

    starts, held, rows = spans([[40, 7]])
    query = numbers(3, 2, 4, 16, seed=1).transpose(1, 2)  # [B, Hq, T, D] of [B, T, Hq, D]
    keys, values = numbers(rows, 2, 16, seed=2)[:, 1], numbers(16, rows, seed=3).T
    want = slow(query, keys, values, starts, held, 1.0)
    ours = triton.ragged_attend(*(x.to(device) for x in (query, keys, values, starts, held)), 1.0, parts=2)
    torch.testing.assert_close(tuple(x.double().cpu() for x in ours), want, atol=2e-5, rtol=2e-5)


def test_kernel_without_rows_or_queries(device):
    from kvexp_kernels.ragged_attend import triton

    starts, held, _ = spans([[0, 0]])
    query, keys = (x.to(device) for x in (numbers(1, 2, 1, 8), numbers(0, 8)))
    a, s = triton.ragged_attend(query, keys, keys, starts.to(device), held.to(device), 1.0)
    assert not a.any() and torch.isneginf(s).all() and a.shape == (1, 2, 1, 8)
    a, s = triton.ragged_attend(query[:, :, :0], keys, keys, starts.to(device), held.to(device), 1.0)
    assert a.shape == (1, 2, 0, 8) and s.shape == (1, 2, 0)


def test_kernel_with_large_scores(device, poisoned):
    from kvexp_kernels.ragged_attend import triton

    starts, held, rows = spans([[70]])
    query, keys, values = (
        numbers(1, 1, 1, 16) * 100,
        numbers(rows, 16, seed=2) * 100,
        numbers(rows, 16, seed=3),
    )
    want = slow(query, keys, values, starts, held, 1.0)
    ours = triton.ragged_attend(*(x.to(device) for x in (query, keys, values, starts, held)), 1.0, parts=2)
    torch.testing.assert_close(tuple(x.double().cpu() for x in ours), want, atol=1e-2, rtol=1e-5)
