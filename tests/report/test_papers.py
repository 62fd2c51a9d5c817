"""Papers' numbers beside ours."""

from __future__ import annotations

import pytest

from kvexp.report import papers

ENTRY = {
    "paper": "tri",
    "table": "Table 1",
    "model": "Qwen3-8B",
    "task": "aime24",
    "method": "snapkv",
    "budget": 2048,
    "metric": "accuracy",
    "value": 34.6,
    "setting": "8 answers",
    "source": "Table 1",
    "note": None,
}
GROUP = {
    "task": "aime24",
    "rows": [
        {"method": "snapkv", "budget": "1024", "metrics": {"accuracy": {"value": 0.1}}},
        {"method": "snapkv", "budget": "2048", "metrics": {"accuracy": {"value": 0.2}}},
    ],
}


@pytest.fixture
def entries(monkeypatch):
    found = [ENTRY, {**ENTRY, "table": "Table 2", "budget": 512}, {**ENTRY, "task": "math500"}]
    monkeypatch.setattr(papers, "reported", lambda: found)


def test_ours_has_the_same_method_and_budget(entries):
    found = papers.beside(GROUP)
    assert [(one["table"], one["ours"]) for one in found] == [("Table 1", {"value": 0.2}), ("Table 2", None)]
    assert papers.beside({"task": "passkey", "rows": []}) == []


def test_an_experiment_shows_its_own_table(entries):
    assert [one["table"] for one in papers.beside(GROUP, "tri/table1")] == ["Table 1"]
    assert len(papers.beside(GROUP, "tri/other")) == 2


def test_the_stored_numbers_have_every_field():
    for entry in papers.reported():
        assert set(papers.SHOWN) | {"task"} <= set(entry)
