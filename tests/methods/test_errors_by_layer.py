"""A memory's error by layer, as a record tells it: that of the meter, whatever the batches."""

from __future__ import annotations

import pytest

import helpers
from helpers import QUERIES
from kvexp.measure.state_error import errors_by_layer

TRACES = [helpers.tokens(11, seed=seed) for seed in range(8)]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_errors_are_the_meter_s_and_no_batch_changes_them(prepared, family):
    made = prepared(TRACES, 6, family=family, layout="pooled")
    queries = [*QUERIES, helpers.tokens(9, seed=77)]
    found = [
        errors_by_layer(made.method, made.model, made.context, made.memory, queries, size) for size in (1, 8)
    ]
    meter = made.errors(queries)
    for name, expected in (
        ("relative_error", meter.relative_errors()),
        ("log_z_error", meter.log_z_errors()),
    ):
        assert len(expected) == len(made.memory.layers)
        for one in found:
            assert one[name] == pytest.approx(expected, abs=1e-4)
    assert max(found[0]["relative_error"]) > 0.01
