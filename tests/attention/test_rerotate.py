"""Moved keys against those that each layer of a real forward caches at the new position.

A text of one token attends to itself alone, so that its hidden states do not depend on where it stands: its
keys at two positions differ by their rotation and by nothing else, in every layer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import helpers
from kvexp import tiny
from kvexp.attention import families, rerotate
from kvexp.attention.bands import Bands
from kvexp.attention.rerotate import Angles, Rotary, moved

OLD = torch.tensor([0, 0, 3, 17, 250, 1000, 7, 8000])
NEW = torch.tensor([0, 9, 1, 400, 250, 2, 8000, 13])
PRESETS = ("gpt-oss-20b", "glm-4.7-flash", "llama-3.1-8b-instruct")


def models() -> list[Any]:
    cases = [pytest.param(lambda f=f: helpers.model(f), id=f) for f in families.FAMILIES]
    halves = {"rope_interleave": False}
    cases.append(pytest.param(lambda: tiny.build("deepseek_v3", changes=halves), id="deepseek_v3-halves"))
    cases += [pytest.param(lambda f=f"preset:{f}": helpers.model(f), id=f) for f in PRESETS]
    return cases


each_model = pytest.mark.parametrize("build", models())


@torch.no_grad()
def cached(model: Any, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What each layer caches of one token at each of the positions, [H, T, D]."""
    cache = DynamicCache()
    ids = torch.tensor(helpers.tokens(len(positions)))[:, None]
    model(ids, position_ids=positions[:, None], cache=cache)
    return [
        (layer.keys[:, :, 0].transpose(0, 1), layer.values[:, :, 0].transpose(0, 1)) for layer in cache.layers
    ]


@each_model
def test_a_moved_key_is_the_one_that_the_model_makes_there(build: Any) -> None:
    model = build()
    rotary = Rotary(model)
    layers = zip(cached(model, OLD), cached(model, NEW), strict=True)
    for index, (old, new) in enumerate(layers):
        keys, values = moved(rotary, index, *old, OLD, NEW)
        torch.testing.assert_close(keys, new[0], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(values, new[1], atol=2e-5, rtol=1e-5)
        turning, moving = rotary.ordered(*old), rotary.ordered(keys, values)
        assert torch.equal(turning[1], moving[1])  # what no position enters
        if rotary.kind(index) is not None:
            assert not torch.allclose(turning[0], moving[0], atol=1e-2)


@each_model
def test_a_key_that_stays_keeps_its_bits(build: Any) -> None:
    model = build()
    rotary = Rotary(model)
    for index, old in enumerate(cached(model, OLD)):
        for before, after in zip(old, moved(rotary, index, *old, OLD, OLD.clone()), strict=True):
            assert torch.equal(before, after)


@pytest.mark.parametrize("family", ["llama", "cohere2", "gpt_oss", "deepseek_v3", "phi3", "gemma3_text"])
def test_turning_back_undoes_turning_and_keeps_lengths(family: str) -> None:
    model = helpers.model(family)
    rotary = Rotary(model)
    for index, old in enumerate(cached(model, OLD)):
        turning, _ = rotary.ordered(*old)
        angles = rotary.angles(index, NEW)
        if angles is None:
            continue
        torch.testing.assert_close(angles.back(angles.turn(turning)), turning, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(angles.turn(turning).norm(dim=-1), turning.norm(dim=-1))


def test_layers_that_do_not_rotate_move_nothing() -> None:
    for family, still in (("smollm3", [1]), ("cohere2", [1]), ("llama", [])):
        model = helpers.model(family)
        rotary = Rotary(model)
        layers = range(model.config.num_hidden_layers)
        assert [i for i in layers if rotary.kind(i) is None] == still
        for index in still:
            key = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
            assert moved(rotary, index, key, key, OLD[:3], NEW[:3])[0] is key
            assert rotary.angles(index, NEW) is None


def test_gemma_turns_each_kind_of_layer_by_its_own_table() -> None:
    rotary = Rotary(helpers.model("gemma3_text"))
    assert [rotary.kind(i) for i in range(3)] == ["sliding_attention", "full_attention", "sliding_attention"]
    sliding, full = (rotary.angles(i, torch.tensor([5])) for i in (0, 1))
    assert sliding is not None and full is not None
    assert not torch.allclose(sliding.cos, full.cos, atol=1e-2)


def test_three_tokens_turn_the_first_band_by_three_radians() -> None:
    rotary = Rotary(helpers.model("llama"))
    dim = helpers.model("llama").config.head_dim
    key = torch.zeros(1, 1, dim)
    key[..., 0] = 2.0
    keys, _ = moved(rotary, 0, key, key, torch.tensor([10]), torch.tensor([13]))
    expected = torch.zeros(dim, dtype=torch.float64)
    expected[0], expected[dim // 2] = 2 * torch.tensor(3.0).cos(), 2 * torch.tensor(3.0).sin()
    torch.testing.assert_close(keys[0, 0].double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_keys_come_back_in_their_dtype(dtype: torch.dtype) -> None:
    model = helpers.model("llama", dtype)
    rotary = Rotary(model)
    old, new = cached(model, OLD)[1], cached(model, NEW)[1]
    keys, _ = moved(rotary, 1, *old, OLD, NEW)
    assert keys.dtype == dtype
    close = {torch.bfloat16: 0.05, torch.float64: 1e-5}[dtype]  # the model's own table is float32
    torch.testing.assert_close(keys, new[0], atol=close, rtol=close)


def test_angles_broadcast_over_sequences_and_heads() -> None:
    model = helpers.model("llama")
    rotary = Rotary(model)
    angles = rotary.angles(0, torch.stack([OLD, NEW]))  # [2, T, F]
    assert angles is not None and angles.cos.shape == (2, len(OLD), model.config.head_dim // 2)
    x = torch.randn(2, 3, len(OLD), model.config.head_dim, generator=torch.Generator().manual_seed(1))
    turned = angles.unsqueeze(1).turn(x)
    for b, positions in enumerate((OLD, NEW)):
        alone = rotary.angles(0, positions)
        assert alone is not None
        torch.testing.assert_close(turned[b], alone.turn(x[b]))
    picked = angles.at(torch.tensor([[1], [0]]), torch.tensor([[2, 3], [0, 1]]))
    torch.testing.assert_close(picked.cos[0], angles.cos[1, 2:4])


@pytest.mark.parametrize("pairs", ["halves", "adjacent"])
@pytest.mark.parametrize(("width", "last"), [(6, False), (10, False), (10, True)])
def test_whole_factors_turn_as_angles_do(pairs, width, last) -> None:
    """Bands of 6 of `width` numbers; two rows, each turned by five angles."""
    bands = Bands(torch.ones(3, dtype=torch.float64), last=last, after=pairs)
    angle = torch.linspace(-3, 3, 15, dtype=torch.float64).view(5, 3)
    angles = Angles(bands, angle.cos(), angle.sin())
    x = torch.linspace(1, 2, 2 * width, dtype=torch.float64).view(2, 1, width)
    cos, sin = angles.whole(width)
    expected = angles.turn(x.expand(2, 5, width))
    torch.testing.assert_close(x * cos + angles.quarter(x) * sin, expected)
    moved = expected.square().sum(-1)
    torch.testing.assert_close(moved, x.square().sum(-1).expand(2, 5))  # a rotation


@pytest.mark.parametrize("family", ["llama", "glm4", "deepseek_v3"])
def test_the_kernel_takes_the_same_turn(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rotary = Rotary(helpers.model(family))
    pairs = rotary.ordered(*(x[None] for x in cached(rotary.model, OLD)[0]))
    angles = rotary.shift(0, OLD, NEW)
    assert angles is not None
    plain = angles.moved(pairs[0])
    monkeypatch.setattr(rerotate, "fused", lambda *tensors: True)  # as where there is a kernel
    torch.testing.assert_close(angles.moved(pairs[0]), plain)
