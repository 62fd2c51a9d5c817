"""Heads join to samples and come back; what an entry costs is counted right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvexp import tiny
from kvexp.errors import UserError
from kvexp.methods.memory.grouping import Grouping
from kvexp.methods.memory.prepare import dims, row_numbers

WAYS = [(group, m) for group in range(1, 5) for m in range(1, group + 1) if group % m == 0]


@pytest.mark.parametrize(("group", "m"), WAYS)
@settings(max_examples=15, deadline=None)
@given(kv_heads=st.integers(1, 4), n=st.integers(1, 5), rest=st.sampled_from([(), (3,), (2, 2)]))
@pytest.mark.parametrize("layout", ["pooled", "shared"])
def test_join_undoes_split(group, m, layout, kv_heads, n, rest):
    grouping = Grouping.of(layout, group * kv_heads, kv_heads, m)
    x = torch.arange(n * group * kv_heads * max(1, torch.Size(rest).numel())).reshape(
        n, group * kv_heads, *rest
    )
    parts = grouping.split(x)
    assert parts.shape == (grouping.codebooks, n * grouping.samples, grouping.heads, *rest)
    assert grouping.codebooks * grouping.samples * grouping.heads == group * kv_heads
    assert torch.equal(grouping.join(parts), x)


def test_heads_land_where_they_should():
    """Two tokens of a model with 8 query heads on 2 KV heads; token t, head h has the value 10 t + h."""
    x = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [10, 11, 12, 13, 14, 15, 16, 17]])
    pooled = [[[0], [1], [2], [3], [10], [11], [12], [13]], [[4], [5], [6], [7], [14], [15], [16], [17]]]
    pairs = [[[0, 1], [2, 3], [10, 11], [12, 13]], [[4, 5], [6, 7], [14, 15], [16, 17]]]
    group = [[[0, 1, 2, 3], [10, 11, 12, 13]], [[4, 5, 6, 7], [14, 15, 16, 17]]]
    shared = [[[0, 1, 2, 3, 4, 5, 6, 7], [10, 11, 12, 13, 14, 15, 16, 17]]]
    shared_pairs = [[[0, 1, 4, 5], [2, 3, 6, 7], [10, 11, 14, 15], [12, 13, 16, 17]]]
    for layout, m, expected in (
        ("pooled", None, pooled),
        ("pairs", None, pairs),
        ("group", None, group),
        ("shared", None, shared),
        ("shared", 2, shared_pairs),
        ("group", 1, pooled),
    ):
        assert Grouping.of(layout, 8, 2, m).split(x).tolist() == expected, layout


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "m"), [(4, 4, 1), (8, 4, 2), (9, 3, 1), (32, 8, 2), (30, 5, 2), (25, 5, 1)]
)
def test_auto_takes_pairs_where_the_group_is_even(q_heads, kv_heads, m):
    assert Grouping.of("auto", q_heads, kv_heads) == Grouping(q_heads, kv_heads, m, False)


def test_a_width_that_does_not_divide_the_group_is_refused_with_those_that_do():
    with pytest.raises(UserError, match=r"layout=pairs joins 2 heads.* group of 3: use .* one of 1, 3$"):
        Grouping.of("pairs", 9, 3)
    with pytest.raises(UserError, match=r"heads_per_entry=5 joins 5 .* one of 1, 2, 3, 4, 6, 12$"):
        Grouping.of("shared", 24, 2, 5)


@pytest.mark.parametrize(
    ("layout", "q_heads", "kv_heads", "traffic", "storage"),
    [
        # A KV row is 2 * 64 = 128 numbers per KV head.
        ("pooled", 9, 3, 64, 129),  # key 64, output 64, one log Z
        ("group", 9, 3, 192, 387),  # three of each
        ("shared", 9, 3, 192, 387),
        ("pairs", 32, 8, 128, 258),  # d' = 2d: the key traffic of a row, twice its storage and two numbers
    ],
)
def test_entries_for_a_budget(layout, q_heads, kv_heads, traffic, storage):
    grouping = Grouping.of(layout, q_heads, kv_heads)
    row = kv_heads * 128
    assert grouping.entry_numbers(64, 64) == (kv_heads * traffic, kv_heads * storage)
    assert grouping.entries(1024, "entries", 64, 64, row) == 1024
    assert grouping.entries(1024, "traffic", 64, 64, row) == 1024 * 128 // traffic
    assert grouping.entries(1024, "storage", 64, 64, row) == 1024 * 128 // storage
    assert grouping.entries(1, "storage", 64, 64, row) == 1


def test_entries_are_matched_to_the_latent_that_mla_caches():
    model = tiny.build("deepseek_v3")  # a token caches one latent of 16 + 8 numbers for its 4 heads
    q_heads, kv_heads, d, dv = dims(model)
    assert (q_heads, kv_heads, d, dv, row_numbers(model)) == (4, 4, 24, 16, 24)
    grouping = Grouping.of("auto", q_heads, kv_heads)
    assert grouping.entry_numbers(d, dv) == (4 * 24, 4 * 41)
    assert grouping.entries(1000, "traffic", d, dv, 24) == 250
    assert grouping.entries(1000, "storage", d, dv, 24) == 146


def test_row_numbers_of_ordinary_heads():
    assert row_numbers(tiny.build("llama")) == 2 * (16 + 16)
    assert row_numbers(tiny.build("gemma3_text")) == 2 * (16 + 16)  # counted in full-attention layers alone
