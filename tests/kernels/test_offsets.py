"""Offsets of more than 31 bits: views into memory of which only the pages in use exist."""

from __future__ import annotations

import pytest
import torch

from kvexp_kernels import gather_compact, lookup, ragged_attend, rerotate, shift_correct, trig_score

FAR = (1 << 30) + 64  # numbers from one head to the next: the third begins behind 2^31


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spread_out(x: torch.Tensor, dim: int, device: str) -> torch.Tensor:
    """Return a copy of x whose items along `dim` lie FAR apart."""
    stride = list(x.contiguous().stride())
    stride[dim] = FAR
    room = torch.empty(FAR * (x.shape[dim] - 1) + x.numel(), dtype=x.dtype, device=device)
    return room.as_strided(x.shape, stride).copy_(x)


def test_gather_compact(device):
    from kvexp_kernels.gather_compact import triton

    x = torch.arange(24, dtype=torch.uint8).view(1, 3, 4, 2)
    keep = torch.tensor([[[0, 2], [1, 3], [2, 3]]])
    (ours,) = triton.gather_compact([spread_out(x, 1, device)], keep.to(device))
    assert torch.equal(ours.cpu(), gather_compact.gather_compact([x], keep)[0])


def test_lookup(device):
    from kvexp_kernels.lookup import triton

    x, (codes, scale) = numbers(3, 2, 16), lookup.quantise_keys(numbers(3, 20, 16, seed=1))
    ours = triton.lookup_flat(x.to(device), spread_out(codes, 0, device), scale.to(device))
    assert torch.equal(ours[0].cpu(), lookup.lookup_flat(x, codes, scale)[0])
    codes, scale = codes[:1, :3], scale[:1, :3]  # the third key lies behind 2^31
    ours = triton.lookup_flat(x[:1].to(device), spread_out(codes, 1, device), scale.to(device))
    assert torch.equal(ours[0].cpu(), lookup.lookup_flat(x[:1], codes, scale)[0])


@pytest.mark.parametrize("dim", [1, 2])
def test_rows(device, dim):
    from kvexp_kernels.rerotate import triton as rotation
    from kvexp_kernels.shift_correct import triton as correction
    from kvexp_kernels.trig_score import triton as scores

    x, angle = numbers(1, 3, 3, 8).half(), numbers(3, 4)
    far = spread_out(x, dim, device)
    turn = rerotate.Turn(angle.cos(), angle.sin())
    there = rerotate.Turn(turn.cos.to(device), turn.sin.to(device))
    near = {"atol": 5e-3, "rtol": 5e-3}
    torch.testing.assert_close(rotation.rerotate(far, there, far).cpu(), rerotate.rerotate(x, turn), **near)
    far.copy_(x)
    mean, units = numbers(2, 3, 8), torch.tensor([[0, 1, -1]])
    ours = correction.shift_correct(far, shift_correct.Shift(mean.to(device), units.to(device)))
    want = shift_correct.shift_correct(x, shift_correct.Shift(mean, units))
    torch.testing.assert_close(ours.cpu(), want, **near)
    vectors = numbers(1, 3, 8)
    ours = scores.trig_score(far, vectors.to(device))
    torch.testing.assert_close(ours.cpu(), trig_score.trig_score(x, vectors), **near)


def test_ragged_attend(device):
    from kvexp_kernels.ragged_attend import triton

    x, starts, lengths = numbers(3, 8).half(), torch.tensor([[0, 2]]), torch.tensor([[2, 1]])
    query = numbers(1, 2, 1, 8).half()
    far = spread_out(x, 0, device)
    ours = triton.ragged_attend(query.to(device), far, far, starts.to(device), lengths.to(device), 1.0)
    want = ragged_attend.ragged_attend(query, x, x, starts, lengths, 1.0)
    torch.testing.assert_close(ours[0].cpu(), want[0], atol=5e-3, rtol=5e-3)
