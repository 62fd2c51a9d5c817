"""Rows that stay move to the front of the same memory, in their order."""

from __future__ import annotations

import pytest
import torch

from kvexp_kernels.gather_compact import gather_compact, reference


def kept(batch: int, heads: int, rows: int, count: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    order = torch.rand(batch, heads, rows, generator=g).argsort(-1)
    return order[..., :count].sort(-1).values


def held(batch: int, heads: int, rows: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    keys = torch.randn(batch, heads, rows, 20, generator=g).to(dtype)
    values = torch.randn(batch, rows, heads, 7, generator=g).to(dtype).transpose(1, 2)
    slots = torch.arange(rows, dtype=torch.int32).repeat(batch, heads, 1)
    return [keys, values, slots, torch.rand(batch, heads, rows, generator=g)]


def test_by_hand():
    x = torch.tensor([[[1, 2, 3, 4], [5, 6, 7, 8]]])
    (front,) = gather_compact([x], torch.tensor([[[0, 3], [1, 2]]]))
    assert front.tolist() == [[[1, 4], [6, 7]]] and front.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("rows", [1, 9, 600])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_kernel(device, dtype, rows, share):
    from kvexp_kernels.gather_compact import triton

    keep = kept(2, 2, rows, round(share * rows))
    want = reference.gather_compact(held(2, 2, rows, dtype), keep)
    tensors = [x.to(device) for x in held(2, 2, rows, dtype)]
    ours = triton.gather_compact(tensors, keep.to(device))
    for x, front, expected in zip(tensors, ours, want, strict=True):
        assert torch.equal(front.cpu(), expected)
        assert front.shape == expected.shape
        assert front.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_kernel_leaves_other_heads_and_the_room_between_alone(device):
    from kvexp_kernels.gather_compact import triton

    buffer = torch.arange(2 * 3 * 8 * 4.0, device=device).view(2, 3, 8, 4)
    before = buffer.clone()
    triton.gather_compact([buffer[:, 1:2, 1:7, ::2]], kept(2, 1, 6, 3).to(device))
    changed = (buffer != before).nonzero()
    assert set(changed[:, 1].tolist()) == {1} and not (changed[:, 3] % 2).any()
    assert changed[:, 2].min() >= 1 and changed[:, 2].max() <= 3


def test_nothing_to_keep_of_nothing(device):
    from kvexp_kernels.gather_compact import triton

    x = torch.zeros(1, 2, 0, 4, device=device)
    assert (
        triton.gather_compact([x], torch.zeros(1, 2, 0, dtype=torch.int64, device=device))[0].shape == x.shape
    )
