from __future__ import annotations

import pytest
import torch

import helpers
from kvexp.attention.bands import Bands, bands
from kvexp.attention.rope import rotate
from kvexp.methods.eviction.adapt import adapted, packed, unpacked
from kvexp.stats.moments import NAMES, Moments, MomentSums

RATE = 0.2


def some(layer: Bands, width: int) -> Moments:
    sums = MomentSums()
    sums.add(*layer.tapped(torch.randn(3, 9, width, generator=torch.Generator().manual_seed(4))))
    return sums.moments()


def queries(batch: int, length: int, width: int) -> torch.Tensor:
    return torch.randn(batch, 3, length, width, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("family", ["llama", "phi3", "deepseek_v3", "gpt_oss"])
def test_one_go_is_one_query_after_the_other(family: str) -> None:
    """Two sequences, the first with two pads in front; each query is what the model made of a known one."""
    model, length = helpers.model(family), 6
    layer, width = bands(model, 1), 24 if family == "deepseek_v3" else 16
    before, start = queries(2, length, width), some(bands(model, 1), width)
    real = torch.ones(2, length, dtype=torch.bool)
    real[0, :2] = False
    positions = torch.stack([torch.tensor([0, 0, 0, 1, 2, 3]), torch.arange(40, 46)])
    turned = torch.stack([rotate(model, before[b], positions[b], 1, scaled=True) for b in range(2)])
    if family == "deepseek_v3":  # its own rotation sorts the even numbers before the odd ones
        still, moved = turned.split([16, 8], dim=-1)
        turned = torch.cat([still, moved.unflatten(-1, (-1, 2)).mT.flatten(-2)], dim=-1)
    found = adapted(start, turned, positions, real, layer, RATE)
    for b in range(2):
        for name in NAMES:
            expected = getattr(start, name)
            for t in range(length):
                if not real[b, t]:
                    continue
                z, x = layer.tapped(before[b, :, t].double())
                one = Moments(z, z.abs(), z.abs().square(), x, x.abs(), x.square())
                expected = (1 - RATE) * expected + RATE * getattr(one, name)
            torch.testing.assert_close(getattr(found, name)[b], expected, atol=1e-4, rtol=1e-4)


def test_in_parts_as_in_one_go_and_through_packing() -> None:
    layer = Bands(torch.tensor([0.9, 0.2], dtype=torch.float64), last=True)
    start, asked = some(layer, 7), queries(1, 5, 7)
    real, positions = torch.ones(1, 5, dtype=torch.bool), torch.arange(5)[None]
    whole = adapted(start, asked, positions, real, layer, RATE)
    first = adapted(start, asked[:, :, :2], positions[:, :2], real[:, :2], layer, RATE)
    again = unpacked(packed(first), layer)
    for name in NAMES:
        assert torch.equal(getattr(again, name), getattr(first, name))
    parts = adapted(again, asked[:, :, 2:], positions[:, 2:], real[:, 2:], layer, RATE)
    for name in NAMES:
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), atol=1e-6, rtol=1e-6)


def test_by_hand() -> None:
    """From mean 0 halfway to 2 and then halfway to 4: 1, then 2.5. A pad moves nothing."""
    layer = Bands(torch.empty(0, dtype=torch.float64))
    none = torch.zeros(1, 0, dtype=torch.complex128)
    start = Moments(none, none.real, none.real, *(torch.zeros(1, 1, dtype=torch.float64) for _ in range(3)))
    asked = torch.tensor([[[[9.0], [2.0], [4.0]]]])
    real = torch.tensor([[False, True, True]])
    found = adapted(start, asked, torch.arange(3)[None], real, layer, 0.5)
    assert found.still_mean.item() == 2.5 and found.still_magnitude.item() == 2.5
    assert found.still_square.item() == 0.5 * (0.5 * 4) + 0.5 * 16
