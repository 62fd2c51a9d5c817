"""The steps that a page shows of a row: which batch, how many points, and nothing that cannot be drawn."""

from __future__ import annotations

import json

import pytest

from kvexp.report import latency
from kvexp.report.facts import group_facts
from kvexp.report.groups import groups
from kvexp.report.items import Items
from kvexp.report.latency import latency_of


def entry(step_ms, pruned=()):
    return {"samples": ["0"], "steps": len(step_ms), "step_ms": step_ms, "pruned": list(pruned)}


@pytest.fixture
def run_of(tmp_path, make_record, store):
    """The function that stores a run with a file of steps (a text, or a list of batches)."""

    def make(content, seed=0):
        record = store(tmp_path / f"{seed}", make_record(seed=seed), [])
        if content is not None:
            text = content if isinstance(content, str) else json.dumps({"batches": content})
            (tmp_path / f"{seed}/latency.json").write_text(text)
        return record

    return make


def test_the_longest_batch_is_shown_and_of_equals_the_latest(run_of):
    first = run_of([entry([9.0, 1.0], [1]), entry([2.0, 3.0], [0])], seed=0)
    second = run_of([entry([4.0])], seed=1)
    assert latency_of([first, second]) == {"every": 1, "ms": [2.0, 3.0], "pruned": [0]}
    third = run_of([entry([1.0, 1.0, 7.0], [2])], seed=2)
    assert latency_of([first, second, third]) == {"every": 1, "ms": [1.0, 1.0, 7.0], "pruned": [2]}


def test_a_point_of_a_long_batch_is_the_longest_of_its_steps(run_of, monkeypatch):
    monkeypatch.setattr(latency, "POINTS", 3)
    record = run_of([entry([1.0, 2.0, 9.0, 1.0, 1.0, 1.0, 5.0], [2, 6])])
    assert latency_of([record]) == {"every": 3, "ms": [9.0, 1.0, 5.0], "pruned": [0, 2]}


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{",
        "[]",
        '{"batches": 3}',
        '{"batches": [{"step_ms": [1.0, NaN], "pruned": []}]}',
        [3, entry([]), entry([1.0], [1]), entry([1.0], ["0"]), entry([0.0]), entry([True]), entry(["1"])],
    ],
)
def test_a_page_does_without_what_is_not_there_or_cannot_be_drawn(content, run_of, make_record):
    record = run_of(content)
    assert latency_of([record, make_record()]) is None  # which has no folder
    (group,) = groups([record])
    [row] = group_facts(group, Items())["rows"]
    assert row["latency"] is None
