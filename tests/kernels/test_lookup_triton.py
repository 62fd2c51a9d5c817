"""The lookup kernels find what the plain forms find, ties included."""

from __future__ import annotations

import pytest
import torch

from kvexp_kernels.lookup import Cells, TwoLevelIndex, cells, lookup_two_level, quantise_keys, reference


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers: products are exact, and ties many."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def stacked(books: int, k: int, width: int, number: int) -> tuple[torch.Tensor, Cells]:
    keys = unit(numbers(books, k, width, seed=5))
    return keys, Cells.stack([TwoLevelIndex.build(one, number - i) for i, one in enumerate(keys)])


@pytest.mark.parametrize(("books", "n", "k", "width", "parts"), [(2, 3, 150, 20, 2), (1, 70, 129, 70, 1)])
def test_flat(device, poisoned, dtype, books, n, k, width, parts):
    from kvexp_kernels.lookup import triton

    x, keys = whole(books, n, width, seed=1, dtype=dtype), whole(books, k, width, seed=2, dtype=dtype)
    index, score = triton.lookup_flat(x.to(device), keys.to(device), parts=parts)
    want, want_score = reference.lookup_flat(x, keys)
    assert torch.equal(index.cpu(), want) and torch.equal(score.cpu(), want_score)
    assert (index.dtype, score.dtype) == (torch.int64, torch.float32)


def test_flat_with_codes_and_strides(device, poisoned):
    from kvexp_kernels.lookup import triton

    x, keys = numbers(3, 2, 24, seed=1).transpose(0, 1), unit(numbers(2, 90, 24, seed=2))
    codes, scale = quantise_keys(keys)
    index, score = triton.lookup_flat(x.to(device), codes.to(device), scale.to(device), parts=2)
    want, want_score = reference.lookup_flat(x, codes, scale)
    assert torch.equal(index.cpu(), want)
    torch.testing.assert_close(score.cpu(), want_score)
    mixed = triton.lookup_flat(x.half().to(device), keys.to(device))[0]
    assert torch.equal(mixed.cpu(), reference.lookup_flat(x.half(), keys)[0])


def test_flat_without_queries(device):
    from kvexp_kernels.lookup import triton

    index, score = triton.lookup_flat(torch.zeros(2, 0, 8, device=device), torch.ones(2, 3, 8, device=device))
    assert index.shape == score.shape == (2, 0)


@pytest.mark.parametrize("probe", [1, 3, 100])
def test_stacked_cells_are_searched_as_each_index(probe):
    keys, held = stacked(2, 90, 8, 7)
    x = numbers(2, 11, 8, seed=6)
    index, score, scored = lookup_two_level(x, held, probe)
    indices = [TwoLevelIndex.build(one, 7 - i) for i, one in enumerate(keys)]
    apart = [one.search(part, probe) for one, part in zip(indices, x, strict=True)]
    assert torch.equal(index, torch.stack([one[0] for one in apart]))
    assert int(scored) == sum(one[1] for one in apart)
    torch.testing.assert_close(score, (x * keys.gather(1, index[..., None].expand(-1, -1, 8))).sum(-1))


@pytest.mark.parametrize("probe", [1, 4, 100])
def test_two_level(device, poisoned, dtype, probe):
    from kvexp_kernels.lookup import triton_cells

    _, held = stacked(2, 90, 20, 7)
    held = held.each(lambda t: t.to(dtype) if t.is_floating_point() else t)
    x = numbers(2, 3, 20, seed=6).to(dtype)
    want, want_score, want_scored = cells.lookup_two_level(x, held, probe)
    ours = triton_cells.lookup_two_level(x.to(device), held.each(lambda t: t.to(device)), probe)
    assert torch.equal(ours[0].cpu(), want) and int(ours[2]) == int(want_scored)
    torch.testing.assert_close(ours[1].cpu(), want_score)


def test_two_level_ties_go_to_the_lower_entry(device, poisoned):
    from kvexp_kernels.lookup import triton_cells

    keys = torch.eye(4)[torch.randint(0, 4, (40,), generator=torch.Generator().manual_seed(0))]
    held = Cells.stack([TwoLevelIndex.build(keys, 4)])
    x = whole(1, 9, 4, seed=3)
    index = triton_cells.lookup_two_level(x.to(device), held.each(lambda t: t.to(device)), 4)[0]
    assert torch.equal(index.cpu(), reference.lookup_flat(x, keys[None])[0])


def test_queries_that_are_no_numbers_stay_in_bounds(device):
    from kvexp_kernels.lookup import triton, triton_cells

    keys, held = stacked(1, 30, 16, 4)
    x = torch.full((1, 1, 16), torch.nan, device=device)
    held = held.each(lambda t: t.to(device))
    for index in (triton.lookup_flat(x, keys.to(device))[0], triton_cells.lookup_two_level(x, held, 2)[0]):
        assert 0 <= int(index) < 30


def test_too_many_cells_are_refused(device):
    from kvexp_kernels.lookup import triton_cells

    held = Cells(*(torch.zeros(1, n, 4) for n in (1025, 2000, 2000, 1026)))
    with pytest.raises(ValueError, match="1025 cells"):
        triton_cells.lookup_two_level(torch.zeros(1, 1, 4), held, 2)
