"""Means over tasks, by hand, and where there is none."""

from __future__ import annotations

import pytest

from kvexp.report.averages import means
from kvexp.report.facts import group_facts
from kvexp.report.groups import groups
from kvexp.report.items import Items


def facts(records):
    return [group_facts(group, Items()) for group in groups(records)]


def test_the_unweighted_mean_of_rows_that_all_tasks_have(make_record):
    records = [
        make_record("snapkv", 512, task="a", accuracy=0.2, stderr=0.03, n=10),
        make_record("snapkv", 512, task="b", accuracy=0.6, stderr=0.04, n=90),
        make_record("snapkv", 256, task="a", accuracy=0.1),
        make_record("tova", 512, task="b", accuracy=0.1),
    ]
    (found,) = means(facts(records))
    assert (found["title"], found["parts"]) == ("mean over 2 tasks · tiny", ["mean [a]", "mean [b]"])
    (row,) = found["rows"]
    assert (row["label"], row["budget"]) == ("snapkv", "512")
    mean = row["metrics"]["mean"]
    assert mean["value"] == pytest.approx(0.4) and mean["se"] == pytest.approx(0.025) and mean["n"] == 100
    assert mean["se_seeds"] is None and mean["high"] == pytest.approx(0.4 + 1.96 * 0.025)
    assert row["metrics"]["mean [b]"]["value"] == 0.6
    assert row["cost"]["kv_tokens"] == 1024


def test_no_mean_over_two_settings_one_task_or_errors(make_record):
    one = make_record(task="a")
    twice = {**make_record(task="b"), "identity": {"limit": 8}}
    assert means(facts([one])) == []
    assert means(facts([one, twice, make_record(task="b")])) == []
    lower = make_record(task="b")
    lower["metrics"] = {"kl": {**lower["metrics"]["accuracy"], "higher_is_better": False}}
    assert means(facts([one, lower])) == []
    assert means(facts([one, make_record("tova", task="b")])) == []
