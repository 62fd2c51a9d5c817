from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvexp.errors import UserError

ROW = 3 * 2 * 16 * 2 * 4  # bytes of a row of keys and values in all layers of the tiny Llama
LAYERS, BUDGET, INTERVAL = 3, 24, 8


@pytest.fixture
def bench(script, monkeypatch: pytest.MonkeyPatch):
    """The script, with an eviction that a few steps show."""
    found = script("decode_bench")
    plus = f"{found.PLUS} method.interval={INTERVAL} method.recent=4"
    monkeypatch.setattr(found, "PLUS", plus)
    return found


def test_memory_stays_where_rows_leave(bench, words) -> None:
    numbers = bench.NUMBERS | {"tokens": 40, "mark": 20}
    of_method = [*bench.PLUS.split(), f"budget={BUDGET}"]
    marks = bench.memory_of([*of_method, *words], numbers)["memory_triattention_plus"]["marks"]
    assert [one["made"] for one in marks] == [20, 40]
    for one in marks:
        assert BUDGET <= one["rows"] < BUDGET + INTERVAL
        assert one["counted"] >= one["rows"] * ROW
        assert one["meter"] >= one["counted"]
        assert one["alive"] < 2 * (BUDGET + INTERVAL + 64) * ROW  # a buffer keeps room for 64 rows
    full = bench.memory_of(["method=full", *words], numbers)["memory_full"]["marks"]
    assert [one["counted"] for one in full] == [(bench.OPENING + made) * ROW for made in (20, 40)]
    assert all(one["alive"] >= one["counted"] for one in full)
    assert full[0]["process"] > 2**24


def test_latency_counts_what_was_pruned(bench, words) -> None:
    found = bench.latency([*words, f"budget={BUDGET}"], bench.NUMBERS | {"steps": 16, "prompt": BUDGET})[
        "latency"
    ]
    pruned = [one["pruned"] for one in found.values()]
    assert pruned[0] == 0 and pruned[1] == 2 * LAYERS and pruned[3] == 16 * LAYERS
    assert pruned[2] >= LAYERS  # in turns
    for one in found.values():
        assert 0 < one["p50"] <= one["p99"] <= one["max"]


def test_the_batch_is_what_fits(bench, words) -> None:
    numbers = bench.NUMBERS | {"prompt": 40, "new": 16, "timed": 8, "bytes": 800 * ROW}
    found = bench.throughput([*words, f"budget={BUDGET}"], numbers)["throughput"]
    full, plus = found["method=full"], found[bench.PLUS]
    assert full["sequence"] == 104 * ROW and full["batch"] == 7  # 40 rows and room for 64 more
    assert plus["batch"] == numbers["bytes"] // plus["sequence"]
    for one in (full, plus):
        assert one["held"] <= numbers["bytes"] and one["rate"] > 0
    assert found["ratio"]["batch"] == plus["batch"] / 7
    with pytest.raises(UserError, match=f"set bytes={104 * ROW} or more"):
        bench.throughput([*words, f"budget={BUDGET}"], numbers | {"bytes": 1000})


def test_a_session_ends_where_bytes_do(bench, words) -> None:
    """Buffers have room for 74 rows, at 80 for 144, and at 150 for 214: more than 190."""
    numbers = bench.NUMBERS | {"turns": 30, "heard": 10, "said": 4, "bytes": 190 * ROW}
    found = bench.session([*words, f"budget={BUDGET}"], numbers)["session"]
    full, plus = found["method=full"], found[bench.PLUS]
    assert full["seen"] == 150 and "set more, or take a method" in full["stopped"]
    assert plus["stopped"] is None
    assert plus["seen"] == plus["next_position"] == 30 * 14
    assert BUDGET + INTERVAL <= plus["rows_peak"] < BUDGET + INTERVAL + 10  # with what a turn brings


def test_parts_are_named(bench, words) -> None:
    for arguments in ([], ["speed"], ["bytes=64M"]):
        with pytest.raises(UserError, match="names no part"):
            bench.main([*arguments, *words])


def test_what_was_found_is_written(bench, words) -> None:
    numbers = ["turns=2", "heard=6", "said=2"]
    assert bench.main(["session", *numbers, f"budget={BUDGET}", *words]) == 0
    folder = Path(words[-1].removeprefix("output_dir="))
    found = json.loads((folder / "decode_bench" / "tiny-llama" / "session.json").read_text())
    assert found["method=full"] == {"seen": 16, "rows": 16, "stopped": None}
    assert found["threads"] > 0 and found["words"][0] == "session"
