"""A memory that holds every query reproduces full attention."""

from __future__ import annotations

import pytest
import torch

import helpers
from helpers import QUERIES

TRACES = [*QUERIES, helpers.tokens(11, seed=5)]


@pytest.mark.parametrize("layout", ["pooled", "group", "shared"])
@pytest.mark.parametrize("key", ["pre", "rope_unified", "rope_actual"])
@pytest.mark.parametrize("aggregate", ["eq5", "mean"])
def test_outputs_and_logits_in_float64(prepared, llama64, layout, key, aggregate):
    made = prepared(TRACES, None, model=llama64, layout=layout, key=key, aggregate=aggregate)
    meter = made.errors(TRACES)
    assert max(meter.relative_errors()) < 1e-9
    assert max(meter.log_z_errors()) < 1e-9
    ours = made.logits(QUERIES)
    assert ours.dtype == torch.float64
    for row, query in enumerate(QUERIES):
        full = helpers.plain_logits(llama64, [*made.context.ids, *query])[-1]
        torch.testing.assert_close(ours[row], full, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "knobs",
    [{"whiten": "full"}, {"whiten": "diagonal"}, {"metric": "cosine"}, {"slope": True}, {"residual": True}],
)
def test_with_every_query_stored_no_option_changes_that(prepared, llama64, knobs):
    made = prepared(TRACES, None, model=llama64, layout="pooled", **knobs)
    assert max(made.errors(TRACES).relative_errors()) < 1e-9


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "phi3", "deepseek_v3", "gemma3_text"])
def test_outputs_in_float32(prepared, family):
    made = prepared(TRACES, None, family=family)
    meter = made.errors(TRACES)
    assert max(meter.relative_errors()) < 1e-4
    assert max(meter.log_z_errors()) < 1e-4


def test_fewer_samples_than_entries_make_an_entry_of_each(prepared):
    """K is cut to the samples there are; queries that occur twice share an entry."""
    made = prepared([TRACES[0], TRACES[0]], 4096, layout="pooled")
    for layer in made.layers():
        assert layer.keys.shape[1] == 3 * len(TRACES[0])  # three heads of a group share a codebook
        assert layer.count.unique().tolist() == [2]
    assert made.memory.manifest["entries"] == 3 * len(TRACES[0])
