"""What `prepare` reports and warns of, and what `encode` needs."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

import helpers
import kvexp
from kvexp.errors import UserError
from kvexp.methods.baseline.full import Full
from kvexp.methods.memory.asm import ASM
from kvexp.prompt import Context

TRACES = [helpers.tokens(10, seed=s) for s in range(4)]


@pytest.mark.parametrize(("budget", "warns"), [(10, False), (11, True)])
def test_too_few_trace_tokens_are_warned_of(prepared, caplog, budget, warns):
    """Forty trace tokens are four for each of ten entries."""
    with caplog.at_level(logging.WARNING):
        prepared(TRACES, budget)
    assert [record.getMessage() for record in caplog.records] == warns * [
        "40 trace tokens for 11 entries is 3.6 each, below 4: raise calibration.n or lower the budget"
    ]


def test_pooled_chunks_count_as_more_trace_tokens(prepared, caplog):
    with caplog.at_level(logging.WARNING):
        prepared(TRACES, 20, chunks=2)
        assert not caplog.records
        prepared(TRACES, 20, chunks=2, chunk_merge="sum")
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("layout", "match", "entries", "traffic", "storage"),
    [
        # llama here: 6 heads on 2, D = Dv = 16, so a KV row is 32 numbers per KV head.
        ("pooled", "entries", 12, 12 * 16 / 32, 12 * 33 / 32),
        ("group", "entries", 12, 12 * 48 / 32, 12 * 99 / 32),
        ("shared", "entries", 12, 12 * 48 / 32, 12 * 99 / 32),
        ("pooled", "traffic", 24, 12.0, 24 * 33 / 32),
        ("group", "traffic", 8, 12.0, 8 * 99 / 32),
        ("pooled", "storage", 11, 11 * 16 / 32, 11 * 33 / 32),
        ("group", "storage", 3, 3 * 48 / 32, 3 * 99 / 32),
    ],
)
def test_three_costs_are_reported(prepared, layout, match, entries, traffic, storage):
    made = prepared(TRACES, 12, layout=layout, match=match)
    manifest = made.memory.manifest
    assert manifest["entries"] == manifest["cost_entries"] == entries
    assert manifest["cost_traffic_rows"] == round(traffic, 1)
    assert manifest["cost_storage_rows"] == round(storage, 1)
    assert made.cache().entries() == [entries] * 3
    if match == "storage":
        assert made.memory.nbytes() <= 3 * 2 * 12 * 32 * 4


def test_the_spread_of_log_z_is_reported(prepared):
    made = prepared(TRACES, 1, layout="pooled")  # one entry: the spread over all samples of a KV head
    stds = []
    for layer in made.samples.layers:
        [block] = made.samples.blocks(layer, 10**6, ["s"])
        stds += [block["s"][:, heads].std(correction=0) for heads in (slice(0, 3), slice(3, 6))]
    expected = float(torch.stack(stds).mean())
    assert made.memory.manifest["log_z_std"] == pytest.approx(expected, abs=1e-3) and expected > 0.1
    assert prepared(TRACES, None, layout="shared", key="rope_actual").memory.manifest["log_z_std"] == 0.0


def test_only_full_layers_get_entries_and_sliding_layers_keep_what_they_can_reach(prepared):
    made = prepared(TRACES, 8, family="gemma3_text")  # sliding, full, sliding; a window of 8
    assert list(made.memory.layers) == [1] and list(made.memory.rows) == [0, 2]
    last = len(made.context)
    for rows in made.memory.rows.values():
        assert rows["positions"].tolist() == [list(range(last - 7, last))]
        assert rows["keys"].shape == rows["values"].shape == (1, 2, 7, 16)


def test_a_memory_is_needed_and_a_plain_list_of_ids_will_do(prepared):
    with pytest.raises(UserError, match=r"asm needs a memory: call method\.prepare"):
        ASM().encode(helpers.model("llama"), helpers.context())
    made = prepared(TRACES, 8, context=Context((), (helpers.tokens(20),)))
    cache = made.method.encode(made.model, helpers.tokens(20), made.memory)
    assert torch.equal(made.logits(TRACES, cache), made.logits(TRACES))
    for other in (helpers.tokens(20, seed=1), list(helpers.tokens(19)), helpers.context()):
        with pytest.raises(UserError, match="the memory was built for context="):
            made.method.encode(made.model, other, made.memory)


def test_a_memory_of_another_model_is_refused(prepared):
    made = prepared(TRACES, 8, context=Context((), (helpers.tokens(20),)))
    redrawn = copy.deepcopy(made.model)
    torch.nn.init.normal_(redrawn.model.layers[2].self_attn.q_proj.weight, std=0.02)
    for model, sentence in (
        (redrawn, "built for weights='"),
        (helpers.model("llama", torch.bfloat16), r"built for dtype='torch.float32', not 'torch.bfloat16'"),
        (helpers.model("qwen3"), "built for architecture='llama"),
    ):
        with pytest.raises(UserError, match=sentence):
            made.method.encode(model, helpers.tokens(20), made.memory)
    assert made.method.encode(copy.deepcopy(made.model), helpers.tokens(20), made.memory).seen == 20


def test_a_cache_of_states_needs_the_taps_of_its_own_method(prepared):
    made = prepared(TRACES, 8)
    with (
        Full().attach(made.model),
        pytest.raises(RuntimeError, match=r"`with method\.attach\(model\)` of the method that encoded it"),
    ):
        made.model(torch.tensor([[5]]), cache=made.cache())


@pytest.mark.parametrize("traces", [[], [[]], [[1, 2], []]])
def test_traces_without_tokens_are_refused(traces):
    with pytest.raises(UserError, match="a memory is learnt from traces"):
        kvexp.prepare(ASM(), helpers.model("llama"), helpers.tokens(20), traces, budget=4)


@pytest.mark.parametrize("budget", [0, -3, 1.5, "0.1%"])
def test_a_budget_of_no_rows_is_refused(budget):
    with pytest.raises(UserError, match=f"budget={budget} .*budget=1024"):
        kvexp.prepare(ASM(), helpers.model("llama"), helpers.tokens(20), TRACES, budget=budget)


def test_a_budget_may_be_a_share_of_the_context():
    memory = kvexp.prepare(ASM(), helpers.model("llama"), helpers.tokens(20), TRACES, budget="20%")
    assert memory.manifest["entries"] == 4


def test_the_same_seed_gives_the_same_memory(prepared):
    one, two, other = (prepared(TRACES, 8, seed=seed) for seed in (0, 0, 1))
    for a, b, c in zip(one.layers(), two.layers(), other.layers(), strict=True):
        assert all(torch.equal(x, b.tensors[name]) for name, x in a.tensors.items())
        assert not torch.equal(a.keys, c.keys)
