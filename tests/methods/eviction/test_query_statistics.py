"""Query statistics equal means over the queries of each segment run on its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import helpers
from kvexp import tiny
from kvexp.attention import families
from kvexp.attention.attach import attention_modules
from kvexp.attention.bands import bands
from kvexp.attention.options import Options, set_options
from kvexp.errors import UserError
from kvexp.methods.eviction.query_statistics import QueryMeter, QueryStatistics, prepare, refuse_other
from kvexp.prompt import Context
from kvexp.stats.moments import NAMES

EMPTY = Context((), ())
SEGMENTS = [helpers.tokens(n, seed=50 + n) for n in (9, 17, 5, 12, 17)]


def measured(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> QueryStatistics:
    return prepare(helpers.model(family, dtype), helpers.Calibration(EMPTY, SEGMENTS, folder))


def brute(model: Any) -> dict[int, list[torch.Tensor]]:
    """Queries before RoPE [Hq, T, D] of every layer and segment, by a hook on plain forwards."""
    config, found, hooks = model.config, {}, []
    family = families.of(config)
    for index, module in enumerate(attention_modules(model)):

        def note(_: Any, __: Any, output: torch.Tensor, index: int = index) -> None:
            found.setdefault(index, []).append(family.query_heads(output, config)[0].double())

        hooks.append(module.get_submodule(family.site(config)).register_forward_hook(note))
    for segment in SEGMENTS:
        model(torch.tensor([segment]))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("family", helpers.FAMILIES)
def test_equal_a_brute_force_computation(family: str, tmp_path: Path) -> None:
    model = tiny.build(family)
    if family == "mistral":
        with pytest.raises(UserError, match="no full-attention layer"):
            measured(family, tmp_path)
        return
    statistics = measured(family, tmp_path)
    queries = brute(model)
    windows = families.layer_windows(model.config)
    assert list(statistics.layers) == [i for i, window in enumerate(windows) if window is None]
    for index, found in statistics.layers.items():
        layer = bands(model, index)
        vectors = torch.cat(queries[index], dim=1)  # [Hq, 60, D]
        assert vectors.shape[1] == 60
        heads = vectors.shape[0]
        for head in range(heads):
            turning, still = layer.tapped(vectors[head])
            expected = [turning.sum(0), turning.abs().sum(0), turning.abs().square().sum(0)]
            expected += [still.sum(0), still.abs().sum(0), still.square().sum(0)]
            for name, total in zip(NAMES, expected, strict=True):
                torch.testing.assert_close(getattr(found, name)[head], total / 60, atol=2e-5, rtol=1e-5)
        assert torch.equal(statistics.bands[index].inv_freq, layer.inv_freq)


def test_parts_of_a_prompt_count_as_the_whole(tmp_path: Path) -> None:
    model = helpers.model("qwen3")
    whole = measured("qwen3", tmp_path / "a")
    set_options(model, Options(prefill_chunk=4))
    try:
        parts = measured("qwen3", tmp_path / "b")
    finally:
        set_options(model, Options())
    for index, found in parts.layers.items():
        torch.testing.assert_close(found.mean, whole.layers[index].mean, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.square, whole.layers[index].square, atol=1e-5, rtol=1e-5)


def test_parts_add_up_in_their_order(tmp_path: Path) -> None:
    model = helpers.model("llama")

    class InParts(helpers.Calibration):
        """Each batch is a part of its own, as other processes may have measured it."""

        def collect(self, start: Any, items: Any, what: str) -> list[Path]:
            folders = []
            for at in range(0, len(items), 2):
                part = start(tmp_path / f"part-{at}")
                part(list(items[at : at + 2]))
                part.close()
                folders.append(tmp_path / f"part-{at}")
            return folders

    shared = prepare(model, InParts(EMPTY, SEGMENTS, tmp_path))
    alone = measured("llama", tmp_path / "alone")
    assert shared.manifest == alone.manifest
    for index, found in shared.layers.items():
        for name in NAMES:
            expected = getattr(alone.layers[index], name)
            torch.testing.assert_close(getattr(found, name), expected, atol=1e-12, rtol=1e-12)


def test_save_and_load(tmp_path: Path) -> None:
    statistics = measured("deepseek_v3", tmp_path)
    statistics.save(tmp_path / "saved")
    facts = {"context": EMPTY.key}
    loaded = QueryStatistics.load(tmp_path / "saved", facts)
    assert loaded.layers.keys() == statistics.layers.keys()
    for index, found in loaded.layers.items():
        assert all(torch.equal(getattr(found, n), getattr(statistics.layers[index], n)) for n in NAMES)
        ours, theirs = loaded.bands[index], statistics.bands[index]
        assert torch.equal(ours.inv_freq, theirs.inv_freq)
        assert replace(ours, inv_freq=theirs.inv_freq) == theirs
    refuse_other(loaded, helpers.model("deepseek_v3"))
    assert loaded.nbytes() == statistics.nbytes() == 2 * 4 * 8 * (4 * 4 + 3 * 16)
    assert loaded.manifest["calibration_tokens"] == 60 and loaded.manifest["calibration_segments"] == 5
    with pytest.raises(UserError, match=r"built for dtype='torch.float32', not 'torch.bfloat16'"):
        QueryStatistics.load(tmp_path / "saved", {**facts, "dtype": "torch.bfloat16"})


def test_statistics_of_another_model_are_refused(tmp_path: Path) -> None:
    statistics = measured("llama", tmp_path)
    with pytest.raises(UserError, match="built for architecture="):
        refuse_other(statistics, helpers.model("qwen3"))
    with pytest.raises(UserError, match="built for weights="):
        refuse_other(statistics, tiny.build("llama", seed=1))
    longer = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
    with pytest.raises(UserError, match="built for rope="):
        refuse_other(statistics, tiny.build("llama", changes=longer))
    with pytest.raises(UserError, match="needs query statistics"):
        refuse_other(None, helpers.model("llama"))


@pytest.mark.parametrize("segments", [[], [(1, 2), ()]])
def test_no_text_is_refused(segments: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="measured on text"):
        prepare(helpers.model("llama"), helpers.Calibration(EMPTY, segments, tmp_path))


def test_concentration_is_the_share_of_size_that_the_mean_keeps(tmp_path: Path) -> None:
    statistics = measured("phi3", tmp_path)
    for index, share in enumerate(statistics.concentrations()):
        m = statistics.layers[index]
        kept = float(m.mean.abs().sum() + m.still_mean.abs().sum())
        assert share == pytest.approx(kept / float(m.magnitude.sum() + m.still_magnitude.sum()))
        assert 0 < share < 1


def test_a_meter_forgets_nothing_between_batches(tmp_path: Path) -> None:
    meter = QueryMeter(helpers.model("llama"))
    for segment in SEGMENTS:
        meter([segment])
    assert {sums.count for sums in meter.sums.values()} == {60}
