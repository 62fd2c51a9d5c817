"""Lookup and merge in one step equal lookup, gathering and one merge."""

from __future__ import annotations

import pytest
import torch

from kvexp_kernels.lookup import Cells, TwoLevelIndex, quantise_keys
from kvexp_kernels.lookup_merge import Entries, lookup_merge

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 0.016}


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def problem(dtype: torch.dtype, books: int = 2, n: int = 3, k: int = 70, heads: int = 2, width: int = 12):
    keys = torch.nn.functional.normalize(numbers(books, k, heads * width, seed=1), dim=-1)
    entries = Entries(
        keys.to(dtype), numbers(books, k, heads, width, seed=2, dtype=dtype), numbers(books, k, heads, seed=3)
    )
    local = numbers(books, n, heads, width, seed=4, dtype=dtype), numbers(books, n, heads, seed=5)
    return numbers(books, n, heads * width, seed=6, dtype=dtype), entries, *local


def two_level(entries: Entries) -> Entries:
    index = Cells.stack([TwoLevelIndex.build(keys.float(), 6) for keys in entries.keys])
    return Entries(entries.keys, entries.a, entries.log_z, cells=index, probe=3)


def to(entries: Entries, device: str) -> Entries:
    held = {
        name: value.to(device) for name, value in vars(entries).items() if isinstance(value, torch.Tensor)
    }
    cells = None if entries.cells is None else entries.cells.each(lambda t: t.to(device))
    return Entries(**held, cells=cells, probe=entries.probe)


def test_by_hand():
    keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    entries = Entries(keys, torch.tensor([[[[2.0]], [[4.0]]]]), torch.tensor([[[0.0], [1.0]]]))
    a, s, index = lookup_merge(
        torch.tensor([[[1.0, 3.0]]]), entries, torch.tensor([[[[10.0]]]]), torch.tensor([[[1.0]]])
    )
    assert index.tolist() == [[1]]
    torch.testing.assert_close(a.flatten(), torch.tensor([7.0]))  # equal masses: the mean of 4 and 10
    torch.testing.assert_close(s.flatten(), torch.tensor([1.0]) + torch.tensor(2.0).log())


def test_entries_in_codes():
    x, entries, *local = problem(torch.float32)
    keys, key_scale = quantise_keys(entries.keys)
    a, a_scale = quantise_keys(entries.a.flatten(0, 1))
    coded = Entries(keys, a.view_as(entries.a), entries.log_z, key_scale, a_scale.view_as(entries.log_z))
    ours, exact = lookup_merge(x, coded, *local), lookup_merge(x, entries, *local)
    assert torch.equal(ours[2], exact[2])
    torch.testing.assert_close(ours[:2], exact[:2], atol=0.02, rtol=0)


@pytest.mark.parametrize("how", ["flat", "codes", "two_level"])
def test_kernel(device, poisoned, dtype, how):
    from kvexp_kernels.lookup_merge import triton

    x, entries, a, s = problem(dtype)
    if how == "codes":
        keys, key_scale = quantise_keys(entries.keys)
        codes, a_scale = quantise_keys(entries.a.flatten(0, 1))
        codes, a_scale = codes.view_as(entries.a), a_scale.view_as(entries.log_z)
        entries = Entries(keys, codes, entries.log_z, key_scale, a_scale)
    if how == "two_level":
        entries = two_level(entries)
    a[0, 1], s[0, 1] = torch.nan, -torch.inf  # nothing local
    a = a.transpose(1, 2).contiguous().transpose(1, 2)  # strides of [C, h, n, Dv]
    want = lookup_merge(x, entries, a, s)
    ours = triton.lookup_merge(x.to(device), to(entries, device), a.to(device), s.to(device), parts=2)
    assert ours[0].dtype == dtype and torch.equal(ours[2].cpu(), want[2])
    torch.testing.assert_close(
        tuple(t.cpu() for t in ours[:2]), want[:2], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def test_kernel_without_queries(device):
    from kvexp_kernels.lookup_merge import triton

    x, entries, a, s = problem(torch.float32, n=0)
    ours = triton.lookup_merge(x.to(device), to(entries, device), a.to(device), s.to(device))
    assert [t.shape for t in ours] == [a.shape, s.shape, (2, 0)]
