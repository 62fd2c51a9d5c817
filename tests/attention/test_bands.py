"""Bands against the rotation that each layer of a real forward does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import helpers
from kvexp import tiny
from kvexp.attention import families
from kvexp.attention.bands import Bands, bands
from kvexp.methods.eviction.listen import listen

TEXT = helpers.tokens(11)


def models() -> list[Any]:
    """Every family, configurations that change the pairing, and real rotary tables (YaRN among them)."""
    cases = [pytest.param(lambda f=f: helpers.model(f), id=f) for f in families.FAMILIES]
    halves = {"rope_interleave": False}
    cases.append(pytest.param(lambda: tiny.build("deepseek_v3", changes=halves), id="deepseek_v3-halves"))
    names = ("gpt-oss-20b", "glm-4.7-flash", "llama-3.1-8b-instruct")
    return [*cases, *(pytest.param(lambda f=f"preset:{f}": helpers.model(f), id=f) for f in names)]


def heard(model: Any) -> list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(layer, query before rotation, rotated query, rotated key) of each layer that sees everything."""
    found: list[Any] = []
    listen(
        model, [TEXT], lambda _, call: found.append((call.layer_index, call.query_pre, call.query, call.key))
    )
    return found


@pytest.mark.parametrize("build", models())
def test_a_band_turns_by_its_frequency_times_the_position(build: Any) -> None:
    model = build()
    for index, before, after, key in heard(model):
        found, positions = bands(model, index), torch.arange(len(TEXT))
        turning, still = found.tapped(before)
        turned, as_before = found.rotated(after)
        expected = found.scaling * turning * found.phases(positions).to(turning.dtype)
        torch.testing.assert_close(turned, expected, atol=2e-5, rtol=1e-4)
        assert torch.equal(still, as_before)
        back, _ = found.turned_back(after, positions)
        torch.testing.assert_close(back, turning, atol=2e-5, rtol=1e-4)
        assert torch.equal(found.joined(turned, as_before), after)
        kind = families.of(model.config).rotated(model.config)[index]
        assert found.count > 0 if kind else found.count == 0

        q, k = (found.rotated(x[:, 0]) for x in (after, key))  # the products of query and key head 0
        ours = (q[0] @ k[0].conj().mT).real + q[1] @ k[1].mT
        torch.testing.assert_close(ours, after[:, 0] @ key[:, 0].mT, atol=2e-4, rtol=1e-4)


def test_what_rotates_in_each_kind_of_model() -> None:
    expected = {  # bands, numbers that stand still, scaling of the layer that is named
        ("llama", 0): (8, 0, 1.0),
        ("phi3", 0): (6, 4, 1.0),  # three quarters of 16 numbers
        ("deepseek_v3", 0): (4, 16, 1.0),  # 8 of 24, the last
        ("gpt_oss", 1): (8, 0, 1.3465736),
        ("smollm3", 1): (0, 16, 1.0),
    }
    for (family, index), (count, still, scaling) in expected.items():
        model = helpers.model(family)
        found = bands(model, index)
        width = families.of(model.config).query_dim(model.config)
        assert (found.count, found.tapped(torch.zeros(width))[1].numel()) == (count, still)
        assert found.scaling == pytest.approx(scaling)
        assert found.inv_freq.dtype == torch.float64
    llama = bands(helpers.model("llama"), 0).inv_freq
    torch.testing.assert_close(llama, 10000.0 ** -(torch.arange(8).double() / 8), rtol=1e-6, atol=0)


def test_gemma_has_frequencies_for_each_kind_of_layer() -> None:
    model = helpers.model("gemma3_text")
    sliding, full = (bands(model, index).inv_freq for index in (0, 1))
    torch.testing.assert_close(sliding[1], torch.tensor(10000.0 ** (-1 / 8)).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(full[1], torch.tensor(1e6 ** (-1 / 8)).double(), rtol=1e-6, atol=0)


def test_pairs_by_hand() -> None:
    """Six numbers, four of them in two bands."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    frequencies = torch.tensor([1.0, 0.5], dtype=torch.float64)
    first = Bands(frequencies).tapped(x)
    assert first[0].tolist() == [1 + 3j, 2 + 4j] and first[1].tolist() == [5, 6]
    last = Bands(frequencies, last=True, before="adjacent").tapped(x)
    assert last[0].tolist() == [3 + 4j, 5 + 6j] and last[1].tolist() == [1, 2]
    moved = Bands(frequencies, last=True, before="adjacent", after="halves")
    assert moved.joined(*last).tolist() == [1, 2, 3, 5, 4, 6]
    assert Bands(frequencies, after="adjacent").joined(*first).tolist() == [1, 3, 2, 4, 5, 6]
    quarter = Bands(torch.tensor([torch.pi / 2], dtype=torch.float64)).phases(torch.tensor([1, 2]))
    torch.testing.assert_close(quarter[:, 0], torch.tensor([1j, -1 + 0j], dtype=torch.complex128))
