from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest

import kvexp
from kvexp.prompt import Context


@pytest.fixture
def tables(script):
    return script("reuse_tables")


def question(tables, lengths: list[int]):
    chunks = tuple(tuple(range(n)) for n in lengths)
    return SimpleNamespace(id="q", context=Context((1, 2), chunks))


def test_the_share_within_a_total_is_the_largest(script) -> None:
    """Of 3 and 5 tokens, shares up to 1/5 give 1 + 1, to 1/3 1 + 2, to 2/5 2 + 2, to 3/5 2 + 3."""
    prompts = script("reuse_prompts")
    shares = {2: "1/5", 3: "1/3", 4: "2/5", 5: "3/5", 8: "1", 9: "1", 0: "1/5"}
    for total, share in shares.items():
        assert prompts.share_within([3, 5], total) == Fraction(share)
    for total in range(4, 40):
        share = prompts.share_within([7, 9, 9, 14], total)
        assert total - 1 <= prompts.given(share, [7, 9, 9, 14]) <= min(total, 39)  # two are of one length


def test_a_ratio_is_of_means_and_its_interval_of_pairs(tables) -> None:
    halves = tables.ratio([0.5, 2.0, 4.0], [1.0, 4.0, 8.0])
    assert (halves.value, halves.low, halves.high, halves.wins, halves.n) == (0.5, 0.5, 0.5, 3, 3)
    mixed = tables.ratio([1.0, 3.0], [2.0, 2.0])  # resamples: 1/2, 1 or 3/2
    assert (mixed.value, mixed.low, mixed.high, mixed.wins) == (1.0, 0.5, 1.5, 1)
    assert str(mixed) == "1.00 (0.50, 1.50)"


def test_rows_of_equal_union_take_what_agentkvshift_took(tables) -> None:
    """Of 10, 20 and 30 tokens the first two are fresh, and 1/10 gives 1 + 2 + 3 more, 2/15 2 + 3 + 4."""
    part = tables.PARTS["prefix"]
    [row] = [one for one in part.rows if one.equal and one.share == "0.1"]
    for union, share in ((14, "1/10"), (15, "2/15")):
        done = {"agentkvshift 0.1": {"union_tokens": union}}
        method = tables.method_of(part, row, question(tables, [10, 20, 30]), done)
        assert method.share == Fraction(share)
    alone = replace(row, equal=False)
    assert tables.method_of(part, alone, question(tables, [10]), {}).share == Fraction(1, 10)


def test_every_row_is_named_once_and_has_its_rival(tables) -> None:
    for name, part in tables.PARTS.items():
        rows = [row.name for row in part.rows]
        assert len(set(rows)) == len(rows)
        for place, row in enumerate(part.rows):
            assert row.built(part.encoded, row.share).encoded == part.encoded
            assert (row.rival(part.rows[:place]) is None) == (not row.beside), row.name
        for goal in tables.GOALS:
            assert goal.part != name or {goal.row, goal.beside} <= set(rows)
    assert {goal.part for goal in tables.GOALS} == {"prefix", "alone", "quantised", "ablation"}


def test_goals_say_when_a_bar_lies_in_the_interval(tables) -> None:
    [goal] = [one for one in tables.GOALS if one.name == "A6"]
    figures = {goal.row: [1.0, 3.0, 2.0], goal.beside: [4.0, 4.0, 4.0]}
    lines = {str(i): {name: {"kl_answer": some[i]} for name, some in figures.items()} for i in range(3)}
    assert "0.50 (0.25, 0.75) | met, within the interval | 3/3" in tables.judged([goal], lines)
    strict = tables.judged([goal._replace(bars={"answer": 0.2})], lines)
    assert "| 0.50 (0.25, 0.75) | missed |" in strict


def test_a_line_that_was_cut_short_is_measured_again(tables, tmp_path) -> None:
    path = tmp_path / "prefix.jsonl"
    lines = [{"prompt": "a", "row": row, "n": n} for row, n in (("x", 1), ("y", 2), ("x", 3))]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"prompt": "a", "ro', encoding="utf-8")
    assert {row: line["n"] for row, line in tables.read(path)["a"].items()} == {"x": 3, "y": 2}
    assert tables.read(tmp_path / "none.jsonl") == {}


def test_knobs_name_the_store(script) -> None:
    prompts = script("reuse_prompts")
    method = kvexp.method("reposition", stored={"name": "kivi", "bits": 4})
    found = prompts.knobs_of(method)
    assert (found["name"], found["stored"]["name"], found["stored"]["bits"]) == ("reposition", "kivi", 4)
    assert json.loads(json.dumps(found)) == found
    assert found != prompts.knobs_of(replace(method, stored=kvexp.method("ott", bits=4)))
