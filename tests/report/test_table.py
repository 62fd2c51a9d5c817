"""The table in the terminal, letter by letter where numbers are known by hand."""

from __future__ import annotations

import io

import pytest

from kvexp.report.table import print_table, render

FULL = {
    "entries_nominal": 4096,
    "entries_peak": 4096,
    "bytes_peak": 12 * 2**20,
    "kv_token_equivalents": 4096.0,
}


@pytest.fixture
def runs(tmp_path, make_record, make_samples, store):
    """Full and one method on 10 items, and one that failed."""
    whole = make_samples([1] * 9 + [0], calibrated=[1] * 10)
    ours = make_samples([1] * 4 + [0] * 5 + [1], calibrated=[1] * 5 + [0] * 5)
    full = make_record("full", "full", accuracy=0.9, stderr=0.095, n=10, calibrated=1.0, cache=FULL)
    snap = make_record(
        accuracy=0.5,
        stderr=0.158,
        n=10,
        calibrated=0.5,
        timing={"encode_s": 2.345, "decode_tokens_per_s": None},
    )
    return [
        store(tmp_path / "snap", snap, ours),
        store(tmp_path / "full", full, whole),
        make_record("h2o", 64, error="evicted is 0: nothing happened"),
    ]


def test_the_main_table(runs):
    lines = render(runs).splitlines()
    assert lines[0] == "task intents · model tiny · seed 0 · 10 items · context 4,096 tokens"
    assert [line.split() for line in lines[5:8]] == [
        ["snapkv", "1024", "0.500", "±.158", "0.500", "±.158", "1,024", "1,024", "3.0", "2.35", "–"],
        ["full", "full", "0.900", "±.095", "1.000", "±.095", "4,096", "4,096", "12.0", "2.00", "50.0"],
        ["h2o", "64", "failed", "–", "–", "–", "–", "–", "–"],
    ]
    heads = " ".join(" ".join(line.split()) for line in lines[1:4])
    for word in (
        "method",
        "budget",
        "accuracy",
        "calibrated",
        "±se",
        "peak",
        "KV-token",
        "MiB",
        "encode",
        "tokens",
    ):
        assert word in heads
    assert "failed: h2o, budget 64, seed 0: evicted is 0: nothing happened" in lines
    assert "all layers; the whole context: 12.0 MiB." in lines
    assert "± is the standard error over items." in lines


def test_the_differences_to_full(runs):
    lines = render(runs).splitlines()
    start = lines.index("difference to full, paired by item")
    raw, calibrated = (lines[start + place].split() for place in (4, 5))
    assert raw[:5] == ["snapkv", "accuracy", "1024", "10", "-0.400"]
    assert raw[-2:] == ["1/5", "0.219"]
    assert calibrated[:3] == ["calibrated", "10", "-0.500"]
    assert calibrated[-2:] == ["0/5", "0.062"]


def test_without_full_there_are_no_differences(runs):
    assert "difference" not in render([run for run in runs if run["choices"]["method"] != "full"])


def test_several_seeds_name_both_errors(tmp_path, make_record, make_samples, store):
    runs = [
        store(
            tmp_path / f"{method}{seed}",
            make_record(method, budget, seed, accuracy=value, n=4),
            make_samples(right, seed=seed, queries=f"{seed}/"),
        )
        for seed in (0, 1)
        for method, budget, value, right in (
            ("full", "full", 0.75, [1, 1, 1, 0]),
            ("snapkv", 1024, 0.25 + seed / 4, [1, seed, 0, 0]),
        )
    ]
    lines = render([*runs, make_record("h2o", 64)]).splitlines()
    assert lines[0].startswith("task intents · model tiny · seeds 0, 1 · 4 to 8 items")
    snap = next(line for line in lines if line.startswith("snapkv")).split()
    assert snap[2] == "0.375" and snap[4] == "±.125"  # accuracies .25 and .5
    assert "± is the standard error over items, then that over seeds." in lines
    assert "h2o, budget 64: one seed only." in lines
    assert any("±items ±seeds" in line for line in lines)
    assert lines[-1].startswith("An item asked under several seeds counts once")


def test_rows_stay_within_the_width_and_words_stay_whole(tmp_path, make_record):
    knobs = {
        "method": {"layout": "shared", "aggregate": "mean", "lookup": "two_level", "key": "rope_unified"}
    }
    other = {"method": {"layout": "pooled", "aggregate": "eq5", "lookup": "flat", "key": "pre"}}
    records = [
        {**make_record("asm", seed=seed, calibrated=0.5), "identity": identity}
        for identity in (knobs, other)
        for seed in (0, 1)
    ]
    text = render(records)
    assert max(map(len, text.splitlines())) <= 100
    for word in ("layout=shared", "aggregate=mean", "lookup=two_level", "key=rope_unified"):
        assert word in text


def test_text_for_files_has_no_escapes_and_terminals_get_colour(runs):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    plain, colour = io.StringIO(), Terminal()
    print_table(runs, plain)
    print_table(runs, colour)
    assert "\x1b" not in plain.getvalue() and plain.getvalue() == render(runs)
    assert "\x1b[1m" in colour.getvalue()


def test_an_ascii_stream_gets_the_table_too(runs):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    print_table(runs, stream)
    assert b"0.900 ?.095" in raw.getvalue()


def test_no_records_give_an_empty_text():
    assert render([]).strip() == ""
