"""Attention to packed rows equals attention to what they come back as."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvexp_kernels.dequant_attend import dequant_attend
from kvexp_kernels.quantise import Packed, quantise

HEADS, GROUPS, WIDTH = 2, 3, 8


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rows(batch: int, keys: int, values: int, dtype: torch.dtype = torch.float64) -> tuple[Packed, Packed]:
    key = numbers(batch, HEADS, keys, WIDTH, seed=1, dtype=dtype)
    value = numbers(batch, HEADS, values, WIDTH - 2, seed=2, dtype=dtype)
    return quantise(key, 4, 4, -2), quantise(value, 4, 4, -1)


def slow(query: torch.Tensor, keys: Packed, values: Packed, visible: torch.Tensor | None = None) -> Any:
    """One softmax over all rows of which both are packed, head by head."""
    key, value = (x.dequantise(query.dtype, 0, values.rows).to(torch.float64) for x in (keys, values))
    outputs = torch.zeros(*query.shape[:3], value.shape[-1], dtype=torch.float64)
    masses = torch.zeros(query.shape[:3], dtype=torch.float64)
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            own, head = min(b, key.shape[0] - 1), h // GROUPS
            scores = query[b, h].double() @ key[own, head].T * 0.5
            if visible is not None:
                scores[:, ~visible[own, head]] = -torch.inf
            masses[b, h] = scores.logsumexp(-1)
            outputs[b, h] = scores.softmax(-1).nan_to_num() @ value[own, head]
    return outputs, masses


@given(
    batch=st.sampled_from([(1, 1), (3, 1), (3, 3)]),
    length=st.integers(1, 4),
    sizes=st.tuples(st.integers(0, 6), st.integers(1, 12)),
    block=st.sampled_from([1, 3, 4, 100]),
    masked=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_equals_one_softmax(
    batch: tuple[int, int], length: int, sizes: tuple[int, int], block: int, masked: bool
) -> None:
    queries, stored = batch
    keys, values = rows(stored, sum(sizes), sizes[1])
    query = numbers(queries, HEADS * GROUPS, length, WIDTH, seed=3)
    visible = None
    if masked:
        visible = numbers(stored, HEADS, sizes[1], seed=4) > 0
    ours = dequant_attend(query, keys, values, 0.5, visible, block=block)
    torch.testing.assert_close(ours, slow(query, keys, values, visible), atol=1e-12, rtol=1e-12)


def test_a_query_that_sees_nothing() -> None:
    keys, values = rows(1, 4, 4)
    query = numbers(2, HEADS * GROUPS, 1, WIDTH, seed=3)
    a, s = dequant_attend(query, keys, values, 0.5, torch.zeros(1, HEADS, 4, dtype=torch.bool))
    assert not a.any() and torch.isneginf(s).all()
    a, s = dequant_attend(query, *(x.part(0, 0) for x in (keys, values)), 0.5)
    assert a.shape == (2, HEADS * GROUPS, 1, WIDTH - 2) and torch.isneginf(s).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_is_float32_and_rows_are_rounded_as_a_cache_would(dtype: torch.dtype) -> None:
    keys, values = rows(1, 8, 8, dtype)
    query = numbers(1, HEADS * GROUPS, 2, WIDTH, seed=3, dtype=dtype)
    a, s = dequant_attend(query, keys, values, 0.5)
    expected, mass = slow(query, keys, values)
    assert (a.dtype, s.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(s.double(), mass, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(a.double(), expected, atol=1e-5 if dtype == torch.float32 else 1e-2, rtol=0)


def test_latents_are_expanded_block_by_block() -> None:
    keys, values = (
        quantise(numbers(1, 1, 6, 4, seed=1), 8, 3, -2),
        quantise(numbers(1, 1, 6, 2, seed=2), 8, 2, -1),
    )
    mix = numbers(6, 3 * 5, seed=5)
    asked: list[int] = []

    def expand(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(latent.shape[2])
        both = torch.cat([latent, rotated], dim=-1)[:, 0] @ mix
        key = both.unflatten(-1, (3, 5)).transpose(1, 2)
        return key, key * 2

    query = numbers(2, 3, 2, 5, seed=3)
    a, s = dequant_attend(query, keys, values, 0.5, None, expand, block=4)
    key, value = expand(keys.dequantise(torch.float64), values.dequantise(torch.float64))
    scores = query @ key.mT * 0.5
    torch.testing.assert_close(a, scores.softmax(-1) @ value)
    torch.testing.assert_close(s, scores.logsumexp(-1))
    assert asked == [4, 2, 6]
