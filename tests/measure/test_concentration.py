"""Concentration of queries and keys: by hand, by hooks on plain forwards, and by the model's own rotation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import helpers
from kvexp import tiny
from kvexp.attention.attach import attention_modules
from kvexp.attention.bands import Bands, bands
from kvexp.attention.rope import rotate
from kvexp.measure.concentration import BandMeter, LayerBands, dominant_points, summary
from kvexp.stats.moments import NAMES, Moments, MomentSums

SEGMENTS = [helpers.tokens(n, seed=70 + n) for n in (11, 6, 15)]


def measured(model: Any) -> dict[int, LayerBands]:
    meter = BandMeter(model)
    meter(SEGMENTS[:2])
    meter(SEGMENTS[2:])
    return meter.layers()


def sizes(mean: list[float], magnitude: list[float]) -> Moments:
    none = torch.zeros(1, 0, dtype=torch.float64)
    size = torch.tensor([magnitude], dtype=torch.float64)
    return Moments(torch.tensor([mean]).to(torch.complex128), size, size.square(), none, none, none)


def test_four_definitions_by_hand() -> None:
    """R of three bands is 0.5, 1 and 0.2; their contributions are 2 * 1, 3 * 2 and 1 * 2, in parts of ten: 2,
    6 and 2. Weighted that is 0.1 + 0.6 + 0.04. Either of the equals may be the second largest."""
    layer = LayerBands(
        Bands(torch.ones(3, dtype=torch.float64)),
        sizes([1, 3, 0.2], [2, 3, 1]),
        sizes([0.9, 1, 1], [1, 2, 2]),
    )
    assert layer.contributions.tolist() == [[2, 6, 2]] and layer.dominant.tolist() == [1]
    found = {name: value.item() for name, value in layer.concentrations().items()}
    assert found["dominant"] == 1 and found["keys"] == 0.5
    assert found["weighted"] == pytest.approx(0.74)
    assert found["plain"] == pytest.approx(1.7 / 3)
    assert found["top2"] in (pytest.approx(0.75), pytest.approx(0.6))
    assert layer.top2_share().item() == pytest.approx(0.8)


def test_summary_by_hand() -> None:
    found = summary(torch.tensor([[0.5, 0.92], [0.97, 0.96]]))
    assert found["mean"] == pytest.approx(0.8375) and found["median"] == pytest.approx(0.92)
    assert (found["above_0.90"], found["above_0.95"]) == (0.75, 0.5)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_moments_are_those_of_a_plain_forward(family: str) -> None:
    model = tiny.build(family)
    measured_layers = measured(model)
    queries: dict[int, list[torch.Tensor]] = {}
    keys: dict[int, list[torch.Tensor]] = {}
    site = {"llama": ("q_proj", "k_proj"), "qwen3": ("q_norm", "k_norm")}[family]
    for index, module in enumerate(attention_modules(model)):
        for name, found in zip(site, (queries, keys), strict=True):

            def note(_: Any, __: Any, output: Any, index: int = index, found: Any = found) -> None:
                heads = output.shape[1:].numel() // output.shape[1] // model.config.head_dim
                found.setdefault(index, []).append(output[0].reshape(output.shape[1], heads, -1).double())

            module.get_submodule(name).register_forward_hook(note)
    for segment in SEGMENTS:
        model(torch.tensor([segment]))
    for index, layer in measured_layers.items():
        for found, ours in ((queries, layer.queries), (keys, layer.keys)):
            vectors = torch.cat(found[index]).transpose(0, 1)  # [heads, 32, D]
            group = ours.mean.shape[0] // vectors.shape[0]
            turning, still = bands(model, index).tapped(vectors.repeat_interleave(group, 0))
            expected = [turning, turning.abs(), turning.abs().square(), still, still.abs(), still.square()]
            for name, value in zip(NAMES, expected, strict=True):
                torch.testing.assert_close(getattr(ours, name), value.mean(1), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_oss"])
def test_the_curve_is_the_logit_of_the_two_means(family: str) -> None:
    model, index = helpers.model(family), 1
    layer = bands(model, index)
    vectors = torch.randn(2, 2, 1, 1, 16, generator=torch.Generator().manual_seed(6))
    moments = []
    for one in vectors:
        sums = MomentSums()
        sums.add(*layer.tapped(one[:, 0]))
        moments.append(sums.moments())
    q, k = ([rotate(model, x, torch.tensor([p]), index, scaled=True) for p in (40, 39, 3)] for x in vectors)
    ours = LayerBands(layer, *moments).curve(torch.tensor([0, 1, 37]))
    for column, key in enumerate(k):
        expected = (q[0] * key).sum(-1)[:, 0, 0]
        torch.testing.assert_close(ours[:, column].float(), expected, atol=2e-4, rtol=1e-4)


def test_layers_without_rotation_or_with_a_window_are_left_out() -> None:
    assert list(measured(helpers.model("gpt_oss"))) == [1]
    assert list(measured(helpers.model("smollm3"))) == [0]
    assert list(measured(helpers.model("deepseek_v3"))) == [0, 1]


def test_points_of_the_dominant_band_turn_with_their_position() -> None:
    model = helpers.model("deepseek_v3")
    layers = measured(model)
    points = dominant_points(model, layers, 1, 3, SEGMENTS[2])
    band = int(layers[1].dominant[3])
    phases = layers[1].bands.phases(torch.arange(15))[:, band]
    for what in ("queries", "keys"):
        before, after = points[what], points[f"turned_{what}"]
        assert before.shape == (15,)
        torch.testing.assert_close(after, before * phases.to(before.dtype), atol=1e-5, rtol=1e-5)
    mean = measured_alone(model, SEGMENTS[2])[1].queries.mean[3, band]
    torch.testing.assert_close(points["queries"].mean().to(mean.dtype), mean, atol=1e-5, rtol=1e-5)


def measured_alone(model: Any, segment: Any) -> dict[int, LayerBands]:
    meter = BandMeter(model)
    meter([segment])
    return meter.layers()
