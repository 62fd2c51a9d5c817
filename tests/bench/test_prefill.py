from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from kvexp.errors import UserError
from kvexp.prompt import Context


@pytest.fixture
def bench(part, monkeypatch: pytest.MonkeyPatch):
    """The script, which sets no threads for the tests that follow."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    return part("prefill")


def test_ratios_are_taken_within_a_repeat(bench) -> None:
    base = bench.Row("full", None, (8.0, 12.0, 10.0))
    row = bench.Row("agentkvshift", "0.1", (2.0, 4.0, 4.0))
    assert row.times(base) == (3.0, 2.5, 4.0)  # 4, 3 and 2.5


def test_the_base_is_the_faster_one(bench) -> None:
    full, again = bench.Row("full", None, (3.0, 9.0, 4.0)), bench.Row("full_recompute", None, (5.0, 5.0, 1.0))
    fast = bench.Row("reposition", None, (0.1, 0.1, 0.1))
    assert bench.base_of([full, again, fast]) is full  # medians 4 and 5
    lines = bench.table([full, again, fast]).splitlines()
    assert lines[4] == "| reposition | – | 0.100 | 40.00 | 30.00 to 90.00 | 1.000 | 1.000 |"


def test_goals_are_for_a_length_and_a_union(bench) -> None:
    def rows(union: float) -> list:
        seconds = {"full": 10.0, "full_recompute": 11.0}
        found = [bench.Row(name, None, (taken,)) for name, taken in seconds.items()]
        found += [bench.Row("agentkvshift", "0.3", (1.0,), 0.1)]
        return [*found, bench.Row("agentkvshift", "0.1", (2.9,), union)]

    [line] = bench.judged(rows(0.2), 2048)
    assert line.endswith("at least 3.5 times as fast: 3.45, missed")
    plain, small = bench.judged(rows(0.15), 4096)
    assert plain.endswith("at least 3.0 times as fast: 3.45, met")
    assert small.endswith("where the union is at most 0.15: 3.45, missed")
    assert bench.judged(rows(0.151), 4096)[1].endswith("not asked, the union is 0.151")
    assert bench.judged(rows(0.1), 1024) == []


def test_each_method_is_built_at_each_share(bench) -> None:
    found = bench.built(["agentkvshift", "agentkvshift_shared", "reposition"], ["0.1", "0.3"])
    assert list(found) == [
        ("full", None),
        ("full_recompute", None),
        ("agentkvshift", "0.1"),
        ("agentkvshift", "0.3"),
        ("agentkvshift_shared", "0.1"),
        ("agentkvshift_shared", "0.3"),
        ("reposition", None),
    ]
    assert {key: one.sets for key, one in found.items() if key[1] == "0.3"} == {
        ("agentkvshift", "0.3"): "separate",
        ("agentkvshift_shared", "0.3"): "shared",
    }
    with pytest.raises(UserError, match="write a share above 0"):
        bench.built(["cacheblend"], ["2"])


def test_time_is_the_processs_own_on_one_thread_of_a_cpu(bench) -> None:
    assert bench.clock_of("cpu", 1) == ("CPU", time.process_time)
    for device, threads in (("cpu", 2), ("cuda:0", 1)):
        assert bench.clock_of(device, threads) == ("wall", time.perf_counter)


def test_lists_are_read(bench) -> None:
    found, others = bench.lists_of(["lengths=512,16384", "methods=prophetkv", "model=tiny-llama"])
    assert found["lengths"] == ["512", "16384"] and found["batches"] == ["1", "4"]
    assert found["methods"] == ["prophetkv"] and others == ["model=tiny-llama"]
    for word, answer in (("lengths=2k", "write lengths=2048,4096"), ("methods=full", "name some of")):
        with pytest.raises(UserError, match=answer):
            bench.lists_of([word])


def test_contexts_are_cut_to_a_length(part) -> None:
    prompts = part("prompts")
    context = Context((1, 2), ((3, 4, 5), (6, 7, 8), (9,)))
    assert prompts.cut(context, 6) == Context((1, 2), ((3, 4, 5), (6,)))
    assert prompts.cut(context, 5) == Context((1, 2), ((3, 4, 5),))
    assert prompts.cut(context, 1) == Context((1,), ())
    assert prompts.cut(context, 99) == context


def test_text_is_cut_into_units(part) -> None:
    prompts = part("prompts")
    text = iter(range(1000))
    context = prompts.in_units(text, (5, 5, 5), 300)
    assert [len(chunk) for chunk in context.chunks] == [128, 128, 41]
    assert context.ids == (5, 5, 5, *range(297))
    assert next(text) == 384  # the rest of the last unit is passed over


def test_what_was_measured_is_written(bench, words) -> None:
    """The header and two units and a bit; every method takes all of them from the store."""
    arguments = ["lengths=288", "batches=1,2", "shares=0.1", "repeats=2", "methods=agentkvshift,reposition"]
    assert bench.main([*arguments, *words]) == 0
    folder = Path(words[-1].removeprefix("output_dir=")) / "bench" / "prefill" / "tiny-llama"
    for batch in (1, 2):
        found = json.loads((folder / f"288x{batch}.json").read_text())
        rows = {row["method"]: row for row in found["rows"]}
        assert list(rows) == ["full", "full_recompute", "agentkvshift", "reposition"]
        assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows.values())
        assert found["base"] in bench.BASES and found["source"] == "stdlib"
        assert rows["reposition"]["union"] == rows["reposition"]["computed"] == 0
        assert 0.1 <= rows["agentkvshift"]["union"] <= 0.22
        checked, rest = 2 / 3, rows["agentkvshift"]["union"] / 3  # of three layers, two run all tokens
        assert rows["agentkvshift"]["computed"] == pytest.approx(checked + rest)
