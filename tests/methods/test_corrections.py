"""The linear residual and the first-order term of log Z: nothing at a centroid, nearer the truth off it."""

from __future__ import annotations

import pytest
import torch

import helpers
from kvexp import tiny
from kvexp.attention import families
from kvexp.methods.memory.asm import ASM
from kvexp.methods.memory.collect import encode_chunks
from kvexp.methods.memory.lookup import MAX_SHIFT, log_z_shift
from kvexp.methods.memory.prepare import collected


def sentences(n, length, first_seed=0):
    """Traces of twelve words."""
    return [tuple(t % 12 for t in helpers.tokens(length, seed=first_seed + s)) for s in range(n)]


TRACES, HELD_OUT = sentences(80, 6), sentences(24, 6, first_seed=1000)


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize(
    "knobs",
    [
        {"layout": "pooled"},
        {"layout": "shared"},
        {"layout": "pooled", "whiten": "full"},
        {"layout": "pooled", "metric": "cosine"},
        {"layout": "pooled", "entries": "int8"},
        {"layout": "pooled", "slope": True},
    ],
)
def test_the_residual_lowers_the_error_on_held_out_queries(prepared, knobs):
    plain, fixed = (
        prepared(TRACES, 24, aggregate="mean", residual=residual, **knobs).errors(HELD_OUT)
        for residual in (False, True)
    )
    assert mean(fixed.relative_errors()) < 0.95 * mean(plain.relative_errors())
    assert mean(fixed.log_z_errors()) < 0.95 * mean(plain.log_z_errors())


@pytest.mark.parametrize("correction", ["residual", "slope"])
@pytest.mark.parametrize("entries", ["model", "int8"])
def test_at_a_centroid_nothing_is_corrected(prepared, correction, entries):
    made = prepared(TRACES, 12, layout="pooled", entries=entries, **{correction: True})
    for layer, memory in made.memory.layers.items():
        keys, a = memory.keys.float(), memory.a.float()
        if entries == "int8":
            keys, a = keys * memory.key_scale[..., None], a * memory.a_scale[..., None]
        centroids = (keys * memory.norm[..., None])[:, :, None]  # [C, K, 1, D]: a sample of one head each
        query = memory.grouping.join(centroids.repeat_interleave(memory.grouping.samples, 1))
        found_a, found_s = made.lookup(layer).find(query)
        for found, expected in ((found_a, a), (found_s, memory.log_z)):
            parts = memory.grouping.split(found)[:, :: memory.grouping.samples]
            torch.testing.assert_close(parts, expected, rtol=0, atol=1e-4)


def test_corrections_of_log_z_are_limited():
    offset, slope = torch.tensor([[100.0, 0.0, 0.5, 0.5]]), torch.tensor([[[1.0, 0.0], [1.0, -2.0]]])
    assert log_z_shift(offset, slope).tolist() == [[MAX_SHIFT, -0.5]]


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_oss"])
@pytest.mark.parametrize("key", ["pre", "rope_actual"])
def test_the_slope_lowers_the_error_of_log_z(prepared, family, key):
    plain, sloped = (
        prepared(TRACES, 96, family=family, layout="pooled", key=key, slope=slope).errors(HELD_OUT)
        for slope in (False, True)
    )
    assert mean(sloped.log_z_errors()) < 0.9 * mean(plain.log_z_errors())


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 4096}
MODELS = {
    "llama": {},
    "gpt_oss": {},  # YaRN, whose table scales queries and keys
    "phi3": {},  # only a part of each head rotates
    "qwen3": {"rope_parameters": YARN},
    "glm4_moe_lite": {},  # MLA, whose rotation reorders
    "deepseek_v3": {"rope_parameters": YARN},
}


@pytest.mark.parametrize("key", ["pre", "rope_unified", "rope_actual"])
@pytest.mark.parametrize("family", MODELS)
def test_the_slope_is_the_derivative_of_log_z(family, key, tmp_path):
    """Move the model's own query projection a little: log Z changes by slope times the move in key space."""
    model = tiny.build(family, changes=MODELS[family]).double()
    if hasattr(model.model.layers[-1].mlp, "experts"):
        model.set_experts_implementation("eager")  # the fused experts have no float64
    method = ASM(key=key, unified_position=5, slope=True)
    layer = model.config.num_hidden_layers - 1  # a full-attention layer in all of them
    attention = model.model.layers[layer].self_attn
    site = attention.get_submodule(families.of(model.config).site(model.config))
    caches = encode_chunks(method, model, helpers.context())
    push: list[torch.Tensor] = []
    hook = site.register_forward_hook(lambda module, args, out: out + push[0].view(1, 1, *out.shape[2:]))
    shape = site.out_features if hasattr(site, "out_features") else (6, 16)
    direction = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    blocks = []
    for at, step in enumerate((-1e-4, 0.0, 1e-4)):
        push[:] = [direction * step]
        store = collected(
            method, model, caches, helpers.Calibration(helpers.context(), TRACES[:2], tmp_path / str(at))
        )
        blocks += list(store.blocks(layer, 10**6))
    hook.remove()
    low, middle, high = blocks
    moved = high["q"] - low["q"]
    assert moved.norm(dim=-1).min() > 1e-5
    expected = (moved * middle["slope"]).sum(-1)
    torch.testing.assert_close(high["s"] - low["s"], expected, rtol=2e-3, atol=1e-8)


def test_summed_chunks_have_the_slope_of_their_sum(tmp_path):
    """log Z of two chunks is the log-sum-exp of theirs, and its derivative the mean by mass of theirs."""
    model, context, trace = helpers.model("llama"), helpers.context(), [TRACES[0]]
    one, whole = ASM(slope=True), ASM(slope=True, chunks=2, chunk_merge="sum")
    alone = []
    for part in encode_chunks(whole, model, context):
        folder = tmp_path / str(len(alone))
        store = collected(one, model, [part], helpers.Calibration(context, trace, folder))
        alone += list(store.blocks(0, 10**6))
    caches = encode_chunks(whole, model, context)
    store = collected(whole, model, caches, helpers.Calibration(context, trace, tmp_path / "both"))
    [both] = store.blocks(0, 10**6)
    mass = torch.stack([part["s"] for part in alone]).softmax(0)[..., None]
    expected = (mass * torch.stack([part["slope"] for part in alone])).sum(0)
    torch.testing.assert_close(both["slope"], expected, rtol=0, atol=2e-3)
    assert not torch.allclose(both["slope"], (alone[0]["slope"] + alone[1]["slope"]) / 2, atol=1e-2)
