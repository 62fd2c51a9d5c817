"""The score of each item."""

from __future__ import annotations

import pytest

from kvexp.report.items import Items, item_score, mean_by_item


def test_a_score_that_stands_in_the_sample_comes_before_the_answer():
    sample = {"answer": "red", "expected": "red", "scores": {"accuracy": 0.0, "f1": 0.25, "kl": None}}
    assert item_score(sample, "accuracy") == 0.0
    assert item_score(sample, "f1") == 0.25
    assert item_score(sample, "kl") is None
    assert item_score({"answer": "red", "expected": "red", "scores": {"red": -1.0}}, "accuracy") == 1.0
    assert item_score({"answer": "blue", "expected": "red"}, "accuracy") == 0.0
    assert item_score({"answer": "blue", "expected": "red"}, "f1") is None


def test_items_are_told_apart_by_query_and_expectation(tmp_path, make_record, make_samples, store):
    first = store(tmp_path / "0", make_record(seed=0), make_samples([1, 0], queries="a"))
    second = store(tmp_path / "1", make_record(seed=1), make_samples([1, 1], queries="b"))
    items = Items()
    values = [items.answers(record, "accuracy") for record in (first, second)]
    assert [sorted(value.values()) for value in values] == [[(0.0,), (1.0,)], [(1.0,), (1.0,)]]
    assert len(mean_by_item(values)) == 4


def test_an_item_asked_twice_has_its_mean(tmp_path, make_record, make_samples, store):
    records = [
        store(tmp_path / str(seed), make_record(seed=seed), make_samples(right, seed=seed))
        for seed, right in enumerate([[1, 0], [1, 1], [0, 1]])
    ]
    means = mean_by_item([Items().answers(record, "accuracy") for record in records])
    assert [mean for (mean,) in means.values()] == pytest.approx([2 / 3, 2 / 3])


def test_missing_samples_or_scores_give_nothing(tmp_path, make_record, make_samples, store):
    assert Items().answers(make_record(), "accuracy") == {}
    assert Items().answers({**make_record(), "folder": str(tmp_path)}, "accuracy") == {}
    record = store(tmp_path / "0", make_record(), make_samples([1, 0]))
    assert Items().answers(record, "accuracy_calibrated") == {}


def test_several_answers_to_a_question_are_one_item(tmp_path, make_record, make_samples, store):
    record = {**make_record(), "identity": {"sampling": {"samples": 2}}}
    rows = make_samples([1, 0, 0, 0])
    for row, (problem, number) in zip(rows, [("7", 0), ("7", 1), ("a/b", 0), ("a/b", 1)], strict=True):
        row |= {"id": f"{problem}/{number}", "query": problem}
    found = Items().answers(store(tmp_path / "0", record, rows), "accuracy")
    assert {item[0]: answers for item, answers in found.items()} == {"7": (1.0, 0.0), "a/b": (0.0, 0.0)}
    assert list(mean_by_item([found, {item: (1.0,) for item in found}]).values()) == [(1.0, 0.0), (0.5, 0.0)]
