"""Papers' numbers beside ours."""

from __future__ import annotations

import pytest

from kvexp.report import papers
from kvexp.report.paper_numbers import PaperNumber

ENTRY = {
    "paper": "tri",
    "table": "table1",
    "model": "qwen3-8b",
    "task": "aime24",
    "method": "snapkv",
    "budget": "2048",
    "metric": "accuracy",
    "value": 34.6,
    "setting": "8 answers",
    "source": "TriAttention",
}


def row(method, budget, value):
    found = {"value": value, "se": 0.01, "se_seeds": None, "low": value - 0.02, "high": value + 0.02, "n": 30}
    return {"label": method, "method": method, "budget": budget, "metrics": {"accuracy": found}}


GROUP = {"task": "aime24", "rows": [row("snapkv", "1024", 0.125), row("snapkv", "2048", 0.25)]}


@pytest.fixture
def entries(monkeypatch):
    changes = ({}, {"table": "table2", "budget": "512"}, {"task": "math500"})
    found = tuple(PaperNumber(**{**ENTRY, **change}) for change in changes)
    monkeypatch.setattr(papers, "numbers", lambda: found)


def test_ours_has_the_same_method_and_budget_and_the_paper_s_unit(entries):
    first, second = papers.beside(GROUP)
    assert (first["value"], first["ours"]["value"], first["ours"]["se"], first["ours"]["n"]) == (
        34.6,
        25,
        1,
        30,
    )
    assert first["ours"]["se_seeds"] is None and second["ours"] is None
    assert papers.beside({"task": "passkey", "rows": []}) == []


def test_shares_stay_shares(monkeypatch):
    monkeypatch.setattr(papers, "numbers", lambda: (PaperNumber(**{**ENTRY, "value": 0.339}),))
    assert papers.beside(GROUP)[0]["ours"]["value"] == 0.25


@pytest.mark.parametrize("experiment", ["tri/table1", "tri/table1_small"])
def test_an_experiment_shows_its_own_table(experiment, entries):
    assert [one["table"] for one in papers.beside(GROUP, experiment)] == ["table1"]
    assert len(papers.beside(GROUP, "tri/other")) == 2


def test_a_method_without_a_budget_stands_beside_any(monkeypatch):
    monkeypatch.setattr(papers, "numbers", lambda: (PaperNumber(**{**ENTRY, "method": "full"}),))
    group = {"task": "aime24", "rows": [row("full", "full", 0.5)]}
    assert papers.beside(group)[0]["ours"]["value"] == 50


def test_numbers_on_the_notes_of_one_memory_stand_beside_those_alone(monkeypatch):
    settings = ("A-MEM, 10 units", "LiCoMemory, 10 units", "8 answers")
    found = tuple(PaperNumber(**{**ENTRY, "setting": setting}) for setting in settings)
    monkeypatch.setattr(papers, "numbers", lambda: found)
    for notes, kept in (("amem", [0, 2]), ("licomemory", [1, 2]), ("rag", [2]), (None, [0, 1, 2])):
        shown = papers.beside({**GROUP, "notes": notes})
        assert [one["setting"] for one in shown] == [settings[place] for place in kept]
