from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import helpers
from kvexp.attention.options import Options, set_options
from kvexp.measure.concentration import BandMeter
from kvexp.measure.reconstruction import ReconstructionMeter, log_spaced
from kvexp.methods.eviction.listen import listen
from kvexp.methods.eviction.reconstruction import pearson

LENGTH, QUERIES = 30, 3
TEXTS = [helpers.tokens(LENGTH + QUERIES + n, seed=80 + n) for n in (0, 4)]


def meters(model: Any) -> tuple[BandMeter, ReconstructionMeter]:
    measured = BandMeter(model)
    measured([helpers.tokens(40, seed=90)])
    compared = ReconstructionMeter(model, measured.layers(), LENGTH, QUERIES)
    for text in TEXTS:
        compared(text)
    return measured, compared


def heard(model: Any, index: int) -> list[Any]:
    """The attention calls of one layer over all texts."""
    calls: list[Any] = []
    for text in TEXTS:
        listen(model, [text], lambda _, call: calls.append(call) if call.layer_index == index else None)
    return calls


def test_correlations_are_those_of_loops() -> None:
    """Logits of a real forward against cosines of each distance, query by query and head by head."""
    model = helpers.model("llama")
    measured, compared = meters(model)
    found, some = compared.correlations(), (log_spaced(LENGTH) - 1).tolist()
    w = model.model.rotary_emb.inv_freq.double()
    for index, layer in measured.layers().items():
        calls = heard(model, index)
        for head in range(6):
            r: dict[str, list[float]] = {"distance": [], "log_distance": [], "trig": [], "trig_norm": []}
            true_at = []
            m, size = layer.queries.mean[head], layer.queries.magnitude[head]
            for call in calls:
                total = call.query.shape[2]
                for t in range(total - QUERIES, total):
                    true, far, near, spread = [], [], [], []
                    for distance in range(1, LENGTH + 1):
                        key = call.key[0, head // 3, t - distance].double()
                        true.append(float(call.query[0, head, t].double() @ key))
                        k = torch.complex(*key.chunk(2)) * torch.exp(-1j * w * (t - distance))
                        turn = torch.exp(1j * w * distance)
                        far.append(float((m * layer.keys.mean[head].conj() * turn).real.sum()))
                        near.append(float((m * k.conj() * turn).real.sum()))
                        spread.append(float(((size - m.abs()) * k.abs()).sum()))
                    r["distance"].append(np.corrcoef(far, true)[0, 1])
                    pair = [far[i] for i in some], [true[i] for i in some]
                    r["log_distance"].append(np.corrcoef(*pair)[0, 1])
                    r["trig"].append(np.corrcoef(near, true)[0, 1])
                    r["trig_norm"].append(np.corrcoef(np.add(near, spread), true)[0, 1])
                    true_at.append(pair[1])
                    curve = pair[0]
            for name, values in r.items():
                assert found[name][index, head].item() == pytest.approx(np.mean(values), abs=1e-4)
            over = np.corrcoef(curve, np.mean(true_at, axis=0))[0, 1]
            assert found["mean_curve"][index, head].item() == pytest.approx(over, abs=1e-4)
            predicted, true_mean = compared.curves()[index]
            assert predicted[head].tolist() == pytest.approx(curve, abs=1e-4)
            assert true_mean[head].tolist() == pytest.approx(np.mean(true_at, axis=0).tolist(), abs=1e-4)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_parts_of_a_prompt_count_as_the_whole(family: str) -> None:
    model = helpers.model(family)
    _, whole = meters(model)
    set_options(model, Options(prefill_chunk=7))
    try:
        _, parts = meters(model)
    finally:
        set_options(model, Options())
    for name, r in whole.correlations().items():
        torch.testing.assert_close(parts.correlations()[name], r, atol=1e-4, rtol=0)


def test_a_text_that_is_too_short_is_refused() -> None:
    compared = ReconstructionMeter(helpers.model("llama"), {}, LENGTH, QUERIES)
    with pytest.raises(ValueError, match="a text of 32 tokens has no 3 queries behind 30"):
        compared(helpers.tokens(32))


def test_pearson() -> None:
    x, y = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for row in range(4):
        assert pearson(x, y)[row].item() == pytest.approx(np.corrcoef(x[row], y[row])[0, 1])
    assert pearson(torch.tensor([1.0, 2.0]), torch.tensor([5.0, 5.0])).item() == 0
    assert pearson(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 1.0])).item() == pytest.approx(-1)


def test_log_spaced_distances() -> None:
    found = log_spaced(1536)
    assert found[0] == 1 and found[-1] == 1536 and len(found) <= 48
    assert bool((found.diff() > 0).all())
    ratios = found[-10:].double()[1:] / found[-10:].double()[:-1]
    torch.testing.assert_close(
        ratios, torch.full((9,), math.exp(math.log(1536) / 47)).double(), rtol=0.01, atol=0
    )
