"""Attention with its log-sum-exp: every backend against a loop over queries, and cases done by hand."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvexp.attention.local import BACKENDS, attend, attend_without_lse
from kvexp.errors import UserError

NAMES = [name for name in BACKENDS if name != "auto"]
each_backend = pytest.mark.parametrize("backend", NAMES)


def by_loop(case: _Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of one query at a time, in float64."""
    query, key, value = (x.double() for x in (case.query, case.key, case.value))
    batch, heads, length, _ = query.shape
    groups = heads // key.shape[1]
    visible = torch.ones(batch, heads, length, key.shape[2], dtype=torch.bool)
    if case.visible is not None:
        visible = visible & case.visible
    if case.causal:
        visible = visible.tril()
    output = torch.zeros(batch, heads, length, value.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads, length), -math.inf, dtype=torch.float64)
    for b, h, t in torch.cartesian_prod(*(torch.arange(n) for n in (batch, heads, length))).tolist():
        rows = visible[b, h, t]
        if rows.any():
            weights = (key[b, h // groups, rows] @ query[b, h, t] * case.scale).exp()
            lse[b, h, t] = weights.sum().log()
            output[b, h, t] = weights @ value[b, h // groups, rows] / weights.sum()
    return output, lse


@dataclass
class _Case:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    visible: torch.Tensor | None = None
    causal: bool = False

    def attend(self, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        with warnings.catch_warnings():  # flex remarks that it is not compiled on a CPU
            warnings.simplefilter("ignore")
            return attend(self.query, self.key, self.value, self.scale, self.visible, self.causal, backend)


@st.composite
def cases(draw: Any, dtype: torch.dtype = torch.float64) -> _Case:
    """Shapes and masks of every kind, some with rows that see nothing."""
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    batch, kv_heads, groups = (draw(st.integers(1, n)) for n in (3, 2, 3))
    length, rows = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    width, out = draw(st.sampled_from([1, 4, 8, 12])), draw(st.sampled_from([1, 4, 8, 12]))
    causal = draw(st.booleans())
    rows = length if causal else rows
    shapes = [(batch, kv_heads * groups, length, width), (batch, kv_heads, rows, width)]
    query, key, value = (
        torch.randn(*shape, generator=numbers, dtype=torch.float64).to(dtype)
        for shape in (*shapes, (batch, kv_heads, rows, out))
    )
    visible = None
    if not causal and draw(st.booleans()):
        full = (batch, kv_heads * groups, length, rows)
        shape = [draw(st.sampled_from([1, n])) for n in full[:3]] + [rows]
        shape = shape[draw(st.integers(0, 2)) :]
        visible = torch.rand(shape, generator=numbers) < draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
    return _Case(query, key, value, draw(st.sampled_from([1.0, 0.3, width**-0.5])), visible, causal)


NEAR = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
each_dtype = pytest.mark.parametrize("dtype", NEAR)


def check(backend: str, case: _Case) -> None:
    """Compare a backend with the loop; lse is float32, or float64 where everything is."""
    output, lse = case.attend(backend)
    expected, mass = by_loop(case)
    dtype = case.query.dtype
    assert (output.dtype, lse.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    torch.testing.assert_close(output.double(), expected, atol=NEAR[dtype], rtol=NEAR[dtype])
    torch.testing.assert_close(lse.double(), mass, atol=NEAR[dtype], rtol=NEAR[dtype])


@each_backend
@pytest.mark.parametrize("length", [1, 5])
def test_one_mask_for_the_heads_of_a_kv_head(backend: str, length: int) -> None:
    """A mask [B or 1, Hkv, T, S] does what it does when it is repeated for each query head."""
    numbers = torch.Generator().manual_seed(length)
    shapes = ((3, 6, length, 8), (3, 2, 9, 8), (3, 2, 9, 4))
    query, key, value = (torch.randn(*shape, generator=numbers) for shape in shapes)
    for batch in (1, 3):
        visible = torch.rand(batch, 2, length, 9, generator=numbers) < 0.5
        visible[:, 1, 0] = False  # a query that sees nothing
        case = _Case(query, key, value, 0.3, visible)
        repeated = replace(case, visible=visible.repeat_interleave(3, dim=1))
        for ours, theirs in zip(case.attend(backend), repeated.attend(backend), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
        visible[:, :, :, 0] = True
        plain = attend_without_lse(query, key, value, 0.3, visible, False)
        expected = attend_without_lse(query, key, value, 0.3, visible.repeat_interleave(3, dim=1), False)
        torch.testing.assert_close(plain, expected, atol=1e-6, rtol=1e-6)


@each_dtype
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_reference_and_flash_equal_the_loop(dtype: torch.dtype, data: Any) -> None:
    case = data.draw(cases(dtype))
    check("reference", case)
    check("flash", case)


@each_dtype
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_flex_equals_the_loop(dtype: torch.dtype, data: Any) -> None:
    check("flex", data.draw(cases(dtype)))


@given(case=cases())
@settings(max_examples=40, deadline=None)
def test_the_fast_path_gives_the_same_output(case: _Case) -> None:
    query, key, value = (x.float() for x in (case.query, case.key, case.value))
    output = attend_without_lse(query, key, value, case.scale, case.visible, case.causal)
    expected, mass = by_loop(case)
    seen = mass.isfinite()[..., None]  # a query without rows is not asked for here
    torch.testing.assert_close(output.double() * seen, expected, atol=1e-5, rtol=1e-5)


@each_backend
def test_by_hand(backend: str) -> None:
    # Scores log 2 and log 6 with scale 1/2: the masses are 2 and 6, the weights 1/4 and 3/4.
    query = torch.tensor([[[[2.0, 0.0]]]])
    key = torch.tensor([[[[math.log(2), 5.0], [math.log(6), -5.0]]]])
    value = torch.tensor([[[[4.0, 0.0], [8.0, 1.0]]]])
    output, lse = _Case(query, key, value, 0.5).attend(backend)
    torch.testing.assert_close(output, torch.tensor([[[[7.0, 0.75]]]]))
    torch.testing.assert_close(lse, torch.tensor([[[math.log(8)]]]))


@each_backend
def test_two_query_heads_share_a_key_head(backend: str) -> None:
    query = torch.tensor([[[[0.0]], [[1.0]], [[0.0]], [[1.0]]]])  # 4 heads
    key = torch.tensor([[[[0.0], [math.log(3)]], [[0.0], [math.log(7)]]]])  # 2 heads, 2 rows
    value = torch.tensor([[[[0.0], [8.0]], [[0.0], [16.0]]]])
    output, lse = _Case(query, key, value, 1.0).attend(backend)
    torch.testing.assert_close(output.flatten(), torch.tensor([4.0, 6.0, 8.0, 14.0]))
    torch.testing.assert_close(lse.flatten().exp(), torch.tensor([2.0, 4.0, 2.0, 8.0]))


@each_backend
@pytest.mark.parametrize("visible", [None, torch.ones(3, 0, dtype=torch.bool)])
def test_no_rows_at_all(backend: str, visible: torch.Tensor | None) -> None:
    query, key, value = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 0, 8), torch.randn(2, 2, 0, 6)
    output, lse = _Case(query, key, value, 1.0, visible).attend(backend)
    assert torch.equal(output, torch.zeros(2, 4, 3, 6))
    assert torch.equal(lse, torch.full((2, 4, 3), -torch.inf))


@each_backend
def test_a_query_that_sees_nothing_is_empty_whatever_the_rows_hold(backend: str) -> None:
    query, key, value = torch.randn(1, 1, 2, 4), torch.full((1, 1, 3, 4), 1e4), torch.full((1, 1, 3, 4), 1e30)
    visible = torch.tensor([[False, False, False], [False, True, False]])
    output, lse = _Case(query, key, value, 1.0, visible).attend(backend)
    assert torch.equal(output[0, 0, 0], torch.zeros(4)) and lse[0, 0, 0] == -torch.inf
    torch.testing.assert_close(output[0, 0, 1], value[0, 0, 1])


@each_backend
def test_scores_beyond_the_range_of_exp(backend: str) -> None:
    query, key = torch.tensor([[[[1.0]]]]), torch.tensor([[[[500.0], [500.0]]]])
    output, lse = _Case(query, key, torch.tensor([[[[1.0], [3.0]]]]), 1.0).attend(backend)
    torch.testing.assert_close(output, torch.full_like(output, 2.0))
    torch.testing.assert_close(lse, torch.full_like(lse, 500 + math.log(2)))


def test_the_fused_kernel_is_refused_elsewhere_than_on_a_cpu() -> None:
    x = torch.empty(1, 1, 1, 4, device="meta")
    with pytest.raises(UserError, match=r"runs on a CPU, not on meta: use model\.attention=auto"):
        attend(x, x, x, 1.0, backend="flash")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_runs_where_no_kernel_is_known(dtype: torch.dtype) -> None:
    query, row = (torch.empty(1, n, 2, 4, device="meta", dtype=dtype) for n in (2, 1))
    output, lse = attend(query, row, row, 1.0)
    assert (output.shape, lse.shape, lse.dtype) == ((1, 2, 2, 4), (1, 2, 2), torch.float32)
