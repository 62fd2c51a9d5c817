"""Rows, averages over seeds, and paired differences."""

from __future__ import annotations

from math import sqrt

import pytest

from kvexp.report.grid import estimate, grids, headlines, paired
from kvexp.report.items import Items


def only(records):
    (grid,) = grids(records)
    return grid


def test_one_grid_for_each_task_and_model(make_record):
    records = [
        make_record(task="a"),
        make_record(task="b"),
        make_record(task="a", model="m"),
        make_record(task="a"),
    ]
    assert [(grid.task, grid.model) for grid in grids(records)] == [("a", "tiny"), ("b", "tiny"), ("a", "m")]


def test_rows_differ_by_method_budget_and_knobs_and_join_seeds(make_record):
    def asm(seed, **identity):
        return {**make_record("asm", seed=seed), "identity": identity}

    shared = {"method": {"layout": "shared", "whiten": False}, "task": {"labels": 12}}
    pooled = {"method": {"layout": "pooled", "whiten": False}, "task": {"labels": 12}}
    records = [
        make_record("full", "full"),
        asm(0, **shared),
        asm(1, **shared),
        asm(0, **pooled),
        asm(0, **shared, empty_prefix=True),
        make_record("snapkv", 512),
        make_record("snapkv", 1024),
    ]
    rows = only(records).rows
    assert [(row.label, row.budget, len(row.records)) for row in rows] == [
        ("full", "full", 1),
        ("asm layout=shared", "1024", 2),
        ("asm layout=pooled", "1024", 1),
        ("asm layout=shared empty_prefix", "1024", 1),
        ("snapkv", "512", 1),
        ("snapkv", "1024", 1),
    ]
    assert rows[3].method == "asm"


def test_knobs_with_one_short_name_keep_their_long_one(make_record):
    records = [
        {**make_record("asm"), "identity": {"method": {"n": 1}, "task": {"n": 1}}},
        {**make_record("asm"), "identity": {"method": {"n": 2}, "task": {"n": 2}}},
    ]
    assert [row.label for row in only(records).rows] == ["asm method.n=1 task.n=1", "asm method.n=2 task.n=2"]


def test_a_seed_that_stands_twice_is_not_averaged(make_record):
    records = [
        {**make_record(seed=0), "cell": "aa"},
        {**make_record(seed=0), "cell": "bb"},
        make_record(seed=1),
    ]
    assert [row.label for row in only(records).rows] == ["snapkv #aa", "snapkv #bb", "snapkv #snapkv10241"]


def test_failed_runs_are_kept_apart_from_the_average(make_record):
    (row,) = only([make_record(seed=0, accuracy=0.25), make_record(seed=1, error="no memory")]).rows
    assert estimate(row, "accuracy", Items()).value == 0.25
    assert [record["error"] for record in row.failed] == ["no memory"]


def test_headlines_prefer_accuracy_and_its_calibrated_twin(make_record):
    assert headlines(only([make_record(), make_record("full", calibrated=0.7)])) == [
        "accuracy",
        "accuracy_calibrated",
    ]
    assert headlines(only([make_record(error="x")])) == ["accuracy"]
    other = make_record()
    other["metrics"] = {"word_perplexity": other["metrics"]["accuracy"]}
    assert headlines(only([other])) == ["word_perplexity"]
    for names in (["kl", "top1_agreement", "perplexity"], ["accuracy", "logprob"]):
        other["metrics"] = dict.fromkeys(names, next(iter(other["metrics"].values())))
        assert headlines(only([other])) == names


def test_one_seed_has_the_recorded_error_and_none_over_seeds(make_record):
    found = estimate(only([make_record(accuracy=0.5, stderr=0.125)]).rows[0], "accuracy", Items())
    assert (found.value, found.se_items, found.se_seeds) == (0.5, 0.125, None)


def test_several_seeds_without_samples_take_the_largest_possible_error(make_record):
    row = only(
        [make_record(seed=0, accuracy=0.4, stderr=0.1), make_record(seed=1, accuracy=0.6, stderr=0.2)]
    ).rows[0]
    found = estimate(row, "accuracy", Items())
    assert found.value == pytest.approx(0.5)
    assert found.se_items == pytest.approx(0.15)
    assert found.se_seeds == pytest.approx(0.1)  # sd of .4 and .6 is .1414, over the root of 2


def test_seeds_with_the_same_items_are_no_larger_sample(tmp_path, make_record, make_samples, store):
    right = [1, 0] * 100
    same = [store(tmp_path / f"s{seed}", make_record(seed=seed), make_samples(right)) for seed in range(4)]
    own = [
        store(tmp_path / f"o{seed}", make_record("h2o", seed=seed), make_samples(right, queries=f"{seed}/"))
        for seed in range(4)
    ]
    same_row, own_row = only([*same, *own]).rows
    one_set = sqrt(0.25 / 200)
    assert estimate(same_row, "accuracy", Items()).se_items == pytest.approx(one_set, rel=0.1)
    assert estimate(own_row, "accuracy", Items()).se_items == pytest.approx(one_set / 2, rel=0.1)


def test_a_paired_difference_by_hand(tmp_path, make_record, make_samples, store):
    # 10 items: both right 4, full alone 5, snapkv alone 1; difference (5 - 9) / 10, p = 2 (1 + 6) / 2^6.
    full = store(tmp_path / "f", make_record("full", "full"), make_samples([1] * 9 + [0]))
    snap = store(tmp_path / "s", make_record(), make_samples([1] * 4 + [0] * 5 + [1]))
    grid = only([full, snap])
    found = paired(grid, grid.rows[1], "accuracy", Items())
    assert (found.items, found.wins, found.losses) == (10, 1, 5)
    assert found.difference.value == pytest.approx(-0.4)
    assert found.difference.se_seeds is None
    assert found.p == pytest.approx(14 / 64)
    # Per-item differences -1 (5), +1 (1), 0 (4): variance 0.6 - 0.16, over 10 items.
    assert found.difference.se_items == pytest.approx(sqrt(0.44 / 10), rel=0.1)
    assert found.low < -0.4 < found.high <= 0.1
    assert paired(grid, grid.rows[0], "accuracy", Items()) is None


def test_pairs_are_matched_by_item_not_by_place(tmp_path, make_record, make_samples, store):
    full = store(tmp_path / "f", make_record("full", "full"), make_samples([1, 1, 0, 0]))
    snap = store(tmp_path / "s", make_record(), list(reversed(make_samples([1, 1, 0, 0])))[:3])
    grid = only([full, snap])
    found = paired(grid, grid.rows[1], "accuracy", Items())
    assert (found.items, found.wins, found.losses, found.difference.value, found.p) == (3, 0, 0, 0.0, 1.0)


def test_pairs_over_seeds_match_seed_with_seed(tmp_path, make_record, make_samples, store):
    runs = []
    for seed, (whole, ours) in enumerate([([1, 1, 1, 1], [1, 1, 0, 0]), ([1, 1, 1, 0], [1, 1, 0, 0])]):
        sets = {"seed": seed, "queries": f"{seed}/"}
        runs.append(
            store(tmp_path / f"f{seed}", make_record("full", "full", seed), make_samples(whole, **sets))
        )
        runs.append(store(tmp_path / f"s{seed}", make_record(seed=seed), make_samples(ours, **sets)))
    runs.append(store(tmp_path / "s2", make_record(seed=2), make_samples([1, 1, 1, 1], seed=2)))
    grid = only(runs)
    found = paired(grid, grid.rows[1], "accuracy", Items())
    assert (found.items, found.wins, found.losses) == (8, 0, 3)
    assert found.difference.value == pytest.approx((-0.5 - 0.25) / 2)
    assert found.difference.se_seeds == pytest.approx(0.125)  # of -.5 and -.25: sd .1768, over the root of 2
    assert found.p == pytest.approx(2 / 8)


def test_full_with_other_settings_or_an_empty_context_is_no_reference(
    tmp_path, make_record, make_samples, store
):
    def run(name, record, **identity):
        return store(tmp_path / name, {**record, "identity": identity}, make_samples([1, 0, 1]))

    longer = run("f1", make_record("full", "full"), task={"context_tokens": 8192}, empty_prefix=False)
    empty = run("f2", make_record("full", "full"), task={"context_tokens": 4096}, empty_prefix=True)
    snap = run("s", make_record(), task={"context_tokens": 4096}, method={"window": 32}, empty_prefix=True)
    grid = only([longer, empty, snap])
    assert paired(grid, grid.rows[2], "accuracy", Items()) is None
    right = run("f3", make_record("full", "full"), task={"context_tokens": 4096}, empty_prefix=False)
    grid = only([longer, empty, snap, right])
    assert paired(grid, grid.rows[2], "accuracy", Items()).items == 3


def test_an_ablation_is_named_by_what_it_changes(make_record):
    usual = {"trig": True, "norm": "weighted", "group": "max", "window": 64}
    changes = [{}, {"trig": False}, {"norm": "none"}, {"group": "mean"}, {"window": 16}]
    records = [
        {**make_record("triattention"), "cell": str(i), "identity": {"method": {**usual, **change}}}
        for i, change in enumerate(changes)
    ]
    assert [row.label for row in only(records).rows] == [
        "triattention",
        "triattention trig=off",
        "triattention norm=none",
        "triattention group=mean",
        "triattention window=16",
    ]


def test_answers_to_one_question_are_one_item_of_a_difference(tmp_path, make_record, make_samples, store):
    def stored(name, method, budget, right):
        record = {**make_record(method, budget), "identity": {"sampling": {"samples": 2}}}
        rows = make_samples(right)
        for at, row in enumerate(rows):
            row |= {"id": f"{at // 2}/{at % 2}", "query": f"q{at // 2}"}
        return store(tmp_path / name, record, rows)

    grid = only(
        [stored("f", "full", "full", [1, 1, 1, 0, 0, 0]), stored("s", "snapkv", 512, [0, 0, 1, 0, 1, 0])]
    )
    pair = paired(grid, grid.rows[1], "accuracy", Items())
    assert (pair.items, pair.wins, pair.losses) == (3, 1, 1)
    assert pair.difference.value == pytest.approx((-1 + 0 + 0.5) / 3)


def test_full_recompute_stands_for_full_where_there_is_none(tmp_path, make_record, make_samples, store):
    def pair(*methods):
        folder = tmp_path / "-".join(methods)
        rows = {"full": [1, 1, 1, 1], "full_recompute": [1, 1, 1, 0], "cacheblend": [1, 0, 0, 0]}
        grid = only([store(folder / m, make_record(m, "full"), make_samples(rows[m])) for m in methods])
        return [paired(grid, row, "accuracy", Items()) for row in grid.rows]

    recomputed, blended = pair("full_recompute", "cacheblend")
    assert recomputed is None and blended.difference.value == -0.5
    full, recomputed, blended = pair("full", "full_recompute", "cacheblend")
    assert full is None and recomputed.difference.value == -0.25 and blended.difference.value == -0.75


def test_the_distance_from_full_attention_stands_among_the_scores(make_record):
    record = make_record(calibrated=0.7)
    record["fidelity"] = {"kl": 0.25, "kl_stderr": 0.05, "top1_agreement": 0.8, "n": 8, "by_layer": {}}
    record["metrics"]["logprob"] = {"value": -2.0, "stderr": 0.1, "n": 8, "higher_is_better": True}
    [grid] = grids([record])
    assert headlines(grid) == ["accuracy", "accuracy_calibrated", "kl"]
    found = grid.rows[0].records[0]["metrics"]
    assert found["kl"] == {"value": 0.25, "stderr": 0.05, "n": 8, "higher_is_better": False}
    assert found["top1_agreement"] == {"value": 0.8, "stderr": None, "n": 8, "higher_is_better": True}
    assert "kl" not in record["metrics"]
    record["metrics"]["kl"] = {"value": 9.0, "stderr": None, "n": 1, "higher_is_better": False}
    assert grids([record])[0].rows[0].records[0]["metrics"]["kl"]["value"] == 9  # a task's own
