"""Only runs of one setting are compared, under names that tell settings apart."""

from __future__ import annotations

from kvexp.report.groups import groups


def run(make_record, method="snapkv", budget=1024, seed=0, *, task=None, **identity):
    record = make_record(method, budget, seed, task=task or "intents")
    return {**record, "identity": {"method": {"name": method}, **identity}}


def test_a_setting_is_all_but_method_budget_and_seed(make_record):
    records = [
        run(make_record, "snapkv", seed=1, task="a", model={"dtype": "auto"}),
        run(make_record, "full", "full", task="a", model={"dtype": "auto", "chat": False}),
        run(make_record, "full", "full", task="a", model={"dtype": "bfloat16"}, limit=8),
        run(make_record, "full", "full", task="b", model={"dtype": "bfloat16"}),
    ]
    found = groups(records)
    assert [(group.title, len(group.grid.rows)) for group in found] == [
        ("a · tiny · dtype=auto", 2),
        ("a · tiny · limit=8 dtype=bfloat16", 1),
        ("b · tiny", 1),
    ]


def test_rows_stand_by_method_then_budget(make_record):
    records = [
        run(make_record, "snapkv", 1024),
        run(make_record, "snapkv", 512),
        run(make_record, "adakv", 512),
        run(make_record, "truncate", 512),
        run(make_record, "no_context", "full"),
        run(make_record, "full", "full"),
    ]
    (group,) = groups(records)
    assert [(row.label, row.budget) for row in group.grid.rows] == [
        ("full", "full"),
        ("no_context", "full"),
        ("truncate", "512"),
        ("adakv", "512"),
        ("snapkv", "512"),
        ("snapkv", "1024"),
    ]


def test_settings_that_share_a_short_name_keep_the_long_one(make_record):
    records = [
        run(make_record, task="a", model={"n": 1}, extra={"n": 1}),
        run(make_record, task="a", model={"n": 2}, extra={"n": 2}),
    ]
    assert [group.words for group in groups(records)] == ["extra.n=1 model.n=1", "extra.n=2 model.n=2"]


def test_a_group_that_lacks_what_its_peers_have_is_the_default(make_record):
    records = [run(make_record, task="a"), run(make_record, task="a", permuted=True)]
    assert [group.words for group in groups(records)] == ["default", "permuted"]
