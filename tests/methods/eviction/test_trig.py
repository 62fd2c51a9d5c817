"""Expected logits: one dot product, cosines with RoPE undone, and real logits of the mean query agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import helpers
from kvexp import tiny
from kvexp.attention import families
from kvexp.attention.bands import Bands, bands
from kvexp.attention.rope import rotate
from kvexp.methods.eviction import trig
from kvexp.methods.eviction.listen import listen
from kvexp.stats.moments import Moments, MomentSums

KINDS = {
    "llama": lambda: helpers.model("llama"),
    "partial": lambda: helpers.model("phi3"),
    "yarn": lambda: helpers.model("preset:gpt-oss-20b"),
    "mla": lambda: helpers.model("deepseek_v3"),
    "mla-halves": lambda: tiny.build("deepseek_v3", changes={"rope_interleave": False}),
    "adjacent": lambda: helpers.model("glm4"),
    "still": lambda: helpers.model("smollm3"),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def layer_of(kind: str) -> Bands:
    """The bands of a full-attention layer (a layer that does not rotate, for "still")."""
    return bands(KINDS[kind](), 1)


def moments(bands: Bands, width: int, heads: int, spread: float = 1.0, seed: int = 0) -> Moments:
    """Moments of random queries around a random centre."""
    numbers = torch.Generator().manual_seed(seed)
    centre = torch.randn(heads, 1, width, generator=numbers, dtype=torch.float64)
    around = torch.randn(heads, 20, width, generator=numbers, dtype=torch.float64)
    sums = MomentSums()
    sums.add(*bands.tapped(centre + spread * around))
    return sums.moments()


def width_of(kind: str) -> int:
    config = KINDS[kind]().config
    return families.of(config).query_dim(config)


def random_keys(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@each_kind
@pytest.mark.parametrize("spacing", ["geometric", "linear"])
def test_one_dot_product_equals_seventeen_cosines(kind: str, spacing: Any) -> None:
    layer, width = layer_of(kind), width_of(kind)
    queries, keys = moments(layer, width, 4), random_keys(2, 2, 40, width)
    upcoming = torch.tensor([30_000, 41])
    positions = torch.stack([torch.arange(29_960, 30_000), torch.arange(40)])[:, None]
    ahead = trig.offsets(spacing, 65536)
    assert len(ahead) == 17
    slow = trig.cosines(keys, positions, queries, layer, ahead, upcoming)
    fast = trig.against(keys, trig.centre(queries, layer, trig.gain(layer, ahead), upcoming))
    torch.testing.assert_close(fast, slow, atol=1e-9, rtol=1e-9)


@each_kind
def test_cosines_are_the_formula(kind: str) -> None:
    """From keys before RoPE, row by row and band by band, largest and mean over offsets."""
    layer, width = layer_of(kind), width_of(kind)
    queries, before = moments(layer, width, 4), random_keys(1, 2, 6, width)
    positions, upcoming, s = torch.tensor([0, 3, 4, 9, 10, 11]), 12, layer.scaling
    turning, still = layer.rotated(before)  # any vectors will do as keys before RoPE, in the cache's layout
    cached = layer.joined(s * turning * layer.phases(positions), still)
    ahead = [1, 2, 4]
    for head in range(4):
        for row in range(6):
            k, rest = turning[0, head // 2, row], still[0, head // 2, row]
            m = queries.mean[head]
            found = []
            for d in ahead:
                distance = upcoming - int(positions[row]) + d
                one = 0.0
                for f in range(layer.count):
                    angle = layer.inv_freq[f] * distance + m[f].angle() - k[f].angle()
                    one += float(s * s * m[f].abs() * k[f].abs() * angle.cos())
                found.append(one + float(queries.still_mean[head] @ rest))
            for how, value in (("mean", sum(found) / 3), ("max", max(found))):
                ours = trig.cosines(
                    cached, positions[None, None], queries, layer, ahead, torch.tensor([upcoming]), how
                )
                assert ours[0, head, row].item() == pytest.approx(value, rel=1e-9, abs=1e-9)


def in_place(model: Any, query: torch.Tensor) -> torch.Tensor:
    """Order the numbers of a query as the model's own rotation leaves them (MLA moves pairs)."""
    config = model.config
    if families.of(config).query_pairing(config) != "adjacent_to_halves":
        return query
    still, turned = query.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
    return torch.cat([still, turned.unflatten(-1, (-1, 2)).mT.flatten(-2)], dim=-1)


@pytest.mark.parametrize("family", [f for f in helpers.FAMILIES if f != "mistral"])
def test_the_score_is_the_logit_when_every_query_is_the_mean(family: str) -> None:
    """Against a real model: its cached keys, and one query rotated by it to each place that is expected."""
    model, length, ahead = helpers.model(family), 14, [1, 2, 4, 8]
    calls: list[Any] = []
    listen(model, [helpers.tokens(length)], lambda _, call: calls.append(call))
    for call in calls:
        index, keys = call.layer_index, call.key
        heads, width = call.query.shape[1], call.query.shape[-1]
        layer = bands(model, index)
        query = torch.randn(1, heads, 1, width, generator=torch.Generator().manual_seed(3))
        sums = MomentSums()
        sums.add(*layer.tapped(query[0].expand(-1, 5, -1)))
        same = sums.moments()
        total = torch.zeros(heads, length)
        for d in ahead:
            turned = in_place(model, rotate(model, query, torch.tensor([length + d]), index, scaled=True))
            group = heads // keys.shape[1]
            total += (turned[0] * keys[0].repeat_interleave(group, 0)).sum(-1) / len(ahead)
        gains = trig.gain(layer, ahead)
        ours = trig.against(keys, trig.centre(same, layer, gains, torch.tensor([length])))
        torch.testing.assert_close(ours[0], total, atol=3e-4, rtol=1e-4)
        for kind in ("weighted", "variance"):  # no spread, nothing to add
            rest = trig.norms(keys, same, layer, kind, call.scale)
            torch.testing.assert_close(rest, torch.zeros_like(rest), atol=1e-4, rtol=0)


@each_kind
def test_norms_weigh_what_the_mean_does_not_keep(kind: str) -> None:
    layer, width, scale = layer_of(kind), width_of(kind), 0.25
    queries, keys = moments(layer, width, 2), random_keys(1, 1, 5, width)
    turning, still = layer.rotated(keys)
    k, rest = turning[0, 0].abs() / layer.scaling, still[0, 0].abs()  # of keys before RoPE
    s2 = layer.scaling**2
    for head in range(2):
        r, m = queries.magnitude[head], queries.mean[head].abs()
        sizes, means = queries.still_magnitude[head], queries.still_mean[head].abs()
        expected = {
            "weighted": s2 * k @ (r - m) + rest @ (sizes - means),
            "unweighted": s2 * k @ r + rest @ sizes,
            "variance": scale / 2 * (s2**2 * k.square() @ queries.variance[head] / 2)
            + scale / 2 * (rest.square() @ queries.still_variance[head]),
        }
        for name, value in expected.items():
            ours = trig.norms(keys, queries, layer, name, scale)[0, head]  # type: ignore[arg-type]
            torch.testing.assert_close(ours, value, atol=1e-10, rtol=1e-10)


def test_the_variance_is_that_of_the_logits() -> None:
    """Queries that lie evenly on circles around their centre, in every combination of two bands."""
    layer = Bands(torch.tensor([1.0, 0.3], dtype=torch.float64), scaling=1.3)
    circle = torch.tensor([1, 1j, -1, -1j], dtype=torch.complex128)
    first, second = 2 + 1j + 0.5 * circle, -1 + 1j + 2 * circle
    turning = torch.stack([first.repeat_interleave(4), second.repeat(4)], dim=-1)[None]  # [1, 16, 2]
    sums = MomentSums()
    sums.add(turning, torch.zeros(1, 16, 0))
    at = layer.phases(torch.tensor(7))
    keys = random_keys(1, 1, 3, 4)
    logits = 0.5 * (layer.scaling * turning[0] * at @ layer.rotated(keys)[0][0, 0].conj().mT).real  # [16, 3]
    expected = logits.var(0, correction=0) / 2 / 0.5
    ours = trig.norms(keys, sums.moments(), layer, "variance", 0.5)[0, 0]
    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-12)


def test_offsets() -> None:
    assert trig.offsets("geometric", 65536) == [2**i for i in range(17)]
    assert trig.offsets("geometric", 100) == [1, 2, 4, 8, 16, 32, 64]
    assert trig.offsets("linear", 65536) == [1 + 4096 * i for i in range(17)]
    assert trig.offsets("linear", 128) == [1, 19, 37, 55, 74, 92, 110, 129]
    assert trig.offsets("linear", 1) == trig.offsets("geometric", 1) == [1]


def test_gain_by_hand() -> None:
    """A band that turns by half a circle a token: one and two tokens ahead cancel. At rest all is 1."""
    layer = Bands(torch.tensor([torch.pi, 0.0, torch.pi / 2], dtype=torch.float64))
    expected = torch.tensor([0, 1, (1j - 1) / 2], dtype=torch.complex128)
    torch.testing.assert_close(trig.gain(layer, [1, 2]), expected, atol=1e-12, rtol=0)


def test_a_smooth_gain_is_the_mean_over_exponential_waiting_times() -> None:
    layer = Bands(torch.tensor([0.0, 0.01, 0.3], dtype=torch.float64))
    grid = torch.linspace(0, 60, 600_001, dtype=torch.float64)
    found = trig.gain(layer, [1, 8], smooth=True)
    for f, w in enumerate(layer.inv_freq):
        parts = []
        for mean in (1, 8):
            x = grid * mean
            density = (-x / mean).exp() / mean
            real, imaginary = (torch.trapezoid(density * g(w * x), x) for g in (torch.cos, torch.sin))
            parts.append(torch.complex(real, imaginary))
        torch.testing.assert_close(found[f], sum(parts) / 2, atol=1e-6, rtol=0)
    many = trig.gain(bands(helpers.model("llama"), 0), trig.offsets("linear", 65536), smooth=True).abs()
    assert bool((many.diff() >= 0).all())  # bands go from fast to slow: a low-pass without spikes


def test_long_caches_come_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, width = layer_of("llama"), width_of("llama")
    queries, keys = moments(layer, width, 2), random_keys(1, 1, 50, width)
    arguments = keys, torch.arange(50)[None, None], queries, layer, [1, 2, 4], torch.tensor([50])
    whole = trig.cosines(*arguments)
    monkeypatch.setattr(trig, "BLOCK", 7)
    assert torch.equal(trig.cosines(*arguments), whole)
