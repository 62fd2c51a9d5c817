"""r of S_trig with true logits of held-out text equals loops over heads, queries, keys and bands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import helpers
from kvexp.attention.attach import attention_modules
from kvexp.attention.options import Options, set_options
from kvexp.attention.rope import rotate
from kvexp.budget import Budget
from kvexp.errors import UserError
from kvexp.methods.eviction.query_statistics import QueryStatistics, prepare, refuse_other
from kvexp.methods.eviction.reconstruction import sampled
from kvexp.methods.eviction.triattention import TriAttention
from kvexp.prompt import Context
from kvexp.stats.moments import NAMES

EMPTY = Context((), ())
SEGMENTS = [helpers.tokens(n, seed=80 + n) for n in (*range(20, 35), 41, 26)]  # 17, of which 2 are held out


def measured(family: str, folder: Path, reconstruction: bool = True) -> QueryStatistics:
    calibration = helpers.Calibration(EMPTY, SEGMENTS, folder)
    return prepare(helpers.model(family), calibration, reconstruction)


def projections(model: Any, ids: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Queries [Hq, T, D] and keys [H, T, D] before RoPE of each layer of a llama, by hooks."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    hooks = []
    for index, module in enumerate(attention_modules(model)):
        for name in ("q_proj", "k_proj"):

            def note(_: Any, __: Any, output: torch.Tensor, key: Any = (index, name)) -> None:
                found[key] = output[0].unflatten(-1, (-1, model.config.head_dim)).transpose(0, 1)

            hooks.append(getattr(module, name).register_forward_hook(note))
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return [(found[i, "q_proj"], found[i, "k_proj"]) for i in range(len(attention_modules(model)))]


def test_r_equals_loops(tmp_path: Path) -> None:
    """Means are of the first 15 segments; r is over 16 queries in the second half of each of the last two."""
    model, statistics = helpers.model("llama"), measured("llama", tmp_path)
    w = model.base_model.rotary_emb.inv_freq.double()
    seen = [projections(model, ids) for ids in SEGMENTS[:15]]
    for index, found in statistics.reconstruction.items():
        queries = torch.cat([layers[index][0] for layers in seen], dim=1).double()
        mean = torch.complex(*queries.mean(1).chunk(2, -1))  # [Hq, F]
        r: dict[int, list[float]] = {}
        for ids in SEGMENTS[15:]:
            query, key = projections(model, ids)[index]
            at = torch.arange(len(ids))
            turned_query, turned_key = (rotate(model, x[None], at, index)[0].double() for x in (query, key))
            group = query.shape[0] // key.shape[0]
            for head in range(query.shape[0]):
                k = torch.complex(*key[head // group].double().chunk(2, -1))  # [T, F]
                for t in sampled(len(ids)):
                    distance = (t - at[:t])[:, None]
                    angles = w * distance + mean[head].angle() - k[:t].angle()
                    foretold = (mean[head].abs() * k[:t].abs() * angles.cos()).sum(-1)
                    true = turned_key[head // group, :t] @ turned_query[head, t]
                    r.setdefault(head, []).append(np.corrcoef(foretold, true)[0, 1])
        assert {len(values) for values in r.values()} == {len(sampled(41)) + len(sampled(26))}
        expected = [np.mean(r[head]) for head in range(len(found))]
        assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_sampled_queries_lie_in_the_second_half_behind_two_keys() -> None:
    assert sampled(64) == list(range(32, 64, 2))
    assert sampled(9) == [4, 5, 6, 7, 8]
    assert sampled(3) == [2] and sampled(2) == []


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "deepseek_v3"])
def test_means_stay_what_they_are_and_parts_count_as_the_whole(family: str, tmp_path: Path) -> None:
    model, plain = helpers.model(family), measured(family, tmp_path / "plain", reconstruction=False)
    whole = measured(family, tmp_path / "whole")
    set_options(model, Options(prefill_chunk=7))
    try:
        parts = measured(family, tmp_path / "parts")
    finally:
        set_options(model, Options())
    assert not plain.reconstruction and whole.reconstruction.keys() == whole.layers.keys()
    for index, r in whole.reconstruction.items():
        assert r.shape == (whole.layers[index].mean.shape[0],) and bool((r.abs() <= 1).all())
        torch.testing.assert_close(parts.reconstruction[index], r, atol=1e-4, rtol=0)
        for name in NAMES:
            ours, theirs = (getattr(one.layers[index], name) for one in (whole, plain))
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)  # of other batches


def test_save_load_and_what_is_counted(tmp_path: Path) -> None:
    statistics = measured("llama", tmp_path)
    statistics.save(tmp_path / "saved")
    loaded = QueryStatistics.load(tmp_path / "saved", {"reconstruction": True})
    assert loaded.reconstruction.keys() == statistics.reconstruction.keys()
    assert all(torch.equal(r, statistics.reconstruction[i]) for i, r in loaded.reconstruction.items())
    assert loaded.manifest["calibration_segments"] == 17
    assert loaded.nbytes() == measured("llama", tmp_path / "plain", False).nbytes() + 3 * 6 * 8


def test_artefacts_without_it_are_refused_or_lie_elsewhere(tmp_path: Path) -> None:
    """The fingerprint of a memory tells the two kinds apart, and one that is handed over is refused."""
    plain, asking = TriAttention(), TriAttention(mode="per_layer_perhead", head_budgets="reconstruction")
    assert plain.memory_facts(Budget(9), 0) == {} != asking.memory_facts(Budget(9), 0)
    model, memory = helpers.model("llama"), measured("llama", tmp_path, reconstruction=False)
    refuse_other(memory, model)
    with pytest.raises(UserError, match="budgets by reconstruction need statistics that say"):
        asking.encode(model, helpers.tokens(9), memory, 5)
    memory.save(tmp_path / "saved")
    with pytest.raises(UserError, match="built for reconstruction="):
        QueryStatistics.load(tmp_path / "saved", {"reconstruction": True})


@pytest.mark.parametrize("segments", [[(1, 2, 3, 4)], [(1, 2, 3, 4), (1, 2)]])
def test_text_that_leaves_nothing_to_compare_is_refused(segments: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="reconstruction is measured on text that the means have not seen"):
        prepare(helpers.model("llama"), helpers.Calibration(EMPTY, segments, tmp_path), True)
