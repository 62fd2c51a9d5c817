"""jsonl: a user's own file, its scores, and what is said of a file that cannot be used."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.report.grid import grids, headlines
from kvexp.report.table import render
from kvexp.run import run
from kvexp.tasks.jsonl import Jsonl, score
from kvexp.tasks.questions import Question

ROWS = [
    {
        "context": "Ann likes tea. Bob likes milk.",
        "query": "What does Ann like?",
        "answer": "tea",
        "group": "a",
    },
    {
        "context": "Ann likes tea. Bob likes milk.",
        "query": "And Bob?",
        "answer": ["milk", "cow's milk"],
        "id": "bob",
    },
    {"context": "It is 7.", "query": "What is it?", "answer": 7},
]


def written(path: Path, rows: list[object] | str) -> str:
    text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.jsonl.gz"])
def test_questions_are_those_of_the_file(words, tmp_path, name):
    path = written(tmp_path / name, ROWS)
    loaded = Jsonl(path=path).load(words, seed=0)
    assert [q.id for q in loaded.questions] == ["line-0", "bob", "line-2"]
    assert [q.expected for q in loaded.questions] == [("tea",), ("milk", "cow's milk"), ("7",)]
    one, other = loaded.questions[:2]
    assert one.context.key == other.context.key and one.group == "a" and loaded.notes["source"] == path
    prompt = words.decode((*one.context.ids[1:], *one.query_ids))
    assert prompt == "Ann likes tea. Bob likes milk.\n\nWhat does Ann like?\nAnswer:"
    assert loaded.data_sha256 == Jsonl(path=path).data_sha256(None)
    held = Jsonl(path=path, n_validation=1)
    parts = [{q.id for q in held.load(words, seed=0, split=s).questions} for s in ("test", "validation")]
    assert not parts[0] & parts[1] and len(parts[0] | parts[1]) == 3 and len(parts[1]) == 1


@pytest.mark.parametrize(
    ("answer", "golds", "found"),
    [
        (" tea", ("tea",), (1, 1, 1)),
        ("Some  TEA.", ("tea",), (2 / 3, 0, 1)),
        ("milk", ("tea", "Milk"), (1, 1, 1)),
        ("steam", ("tea",), (0, 0, 1)),  # a part of a word counts as contained
        ("", ("tea",), (0, 0, 0)),
    ],
)
def test_scores(answer, golds, found):
    made = score(Question("x", 0, None, "", (1,), golds, 8), answer)
    assert [made[name] for name in ("f1", "exact_match", "contains")] == pytest.approx(found)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("{", r"line 1 of .* is not JSON"),
        ([["a"]], "line 1 of .* is no object"),
        ([ROWS[0], {"context": "c", "answer": "a"}], "line 3 of .* has no text 'query'"),
        ([{**ROWS[0], "answer": []}], "has no 'answer'"),
        ("\n", "holds no question"),
        ([{**ROWS[0], "answer": [None]}], "line 1 of .* has no 'answer'"),
        ([{**ROWS[0], "answer": ["tea", True]}], "line 1 of .* has no 'answer'"),
        ([{**ROWS[0], "answer": True}], "line 1 of .* has no 'answer'"),
        ([ROWS[0], {**ROWS[0], "answer": float("nan")}], "line 3 of .* is not JSON .NaN is no number"),
        ('{"context": "c", "query": "q", "answer": 1e999}', "line 1 of .* has no 'answer'"),
        ([{**ROWS[0], "id": ["a"]}], "line 1 of .*: 'id' is no text"),
        ([{**ROWS[0], "group": False}], "line 1 of .*: 'group' is no text"),
        ([ROWS[0], {**ROWS[0], "query": "\ud800?"}], "line 3 of .* has half a character"),
        ([{**ROWS[0], "answer": ["a", "\udc00"]}], "line 1 of .* has half a character"),
        ([{**ROWS[0], "id": "\ud800"}], "line 1 of .* has half a character"),
        ('{"context": ' + 100_000 * "[" + 100_000 * "]" + "}", "line 1 of .* is not JSON .*recursion"),
        (3 * [{**ROWS[0], "id": "x"}], "lines 1 and 3 of .* have one id, 'x'"),
        ([{**ROWS[0], "id": 1}, ROWS[1], {**ROWS[0], "id": "1"}], "lines 1 and 5 of .* have one id, '1'"),
        ([{**ROWS[0], "id": "line-1"}, ROWS[0]], "lines 1 and 3 of .* have one id, 'line-1'"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(words, tmp_path, rows, told):
    with pytest.raises(UserError, match=told):
        Jsonl(path=written(tmp_path / "mine.jsonl", rows)).load(words, seed=0)


def test_what_is_null_is_absent_and_a_mark_of_byte_order_is_no_text(words, tmp_path):
    rows = [{**ROWS[0], "id": None, "group": None}, {**ROWS[1], "id": None}]
    path = written(tmp_path / "mine.jsonl", "\ufeff" + "\n".join(map(json.dumps, rows)))
    questions = Jsonl(path=path).load(words, seed=0).questions
    assert [(one.id, one.group) for one in questions] == [("line-0", ""), ("line-1", "")]


@pytest.mark.parametrize("cut", [slice(-20), slice(5)])
def test_a_packed_file_that_ends_early_or_is_damaged_is_one_sentence(words, tmp_path, cut):
    path = Path(written(tmp_path / "mine.jsonl.gz", ROWS))
    whole = path.read_bytes()
    for damaged in (whole[cut], whole[:10] + bytes(255 - one for one in whole[10:])):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"mine\.jsonl\.gz cannot be read"):
            Jsonl(path=str(path)).load(words, seed=0)


def test_a_file_that_is_missing_or_not_named(words, tmp_path):
    for task, told in (
        (Jsonl(), r"needs task\.path=FILE"),
        (Jsonl(path=str(tmp_path / "no")), "cannot be read"),
    ):
        with pytest.raises(UserError, match=told):
            task.load(words, seed=0)


def test_a_file_is_checked_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("kvexp.model.load_once", lambda *_, **__: pytest.fail("the model was loaded"))
    path = written(tmp_path / "mine.jsonl", 2 * [{**ROWS[0], "id": "x"}])
    words = ["task=jsonl", f"task.path={path}", "method=full", "model=tiny-llama", "logger=none"]
    [settings] = settings_of([*words, f"output_dir={tmp_path / 'out'}"])
    with pytest.raises(UserError, match=r"lines 1 and 3 of .* have one id, 'x'"):
        run(settings)


def test_a_run_over_a_file_of_one_s_own(tmp_path):
    path = written(tmp_path / "mine.jsonl", ROWS)
    words = ["task=jsonl", f"task.path={path}", "task.max_new_tokens=4", "method=snapkv", "budget=40"]
    [settings] = settings_of([*words, "model=tiny-llama", "logger=none", f"output_dir={tmp_path / 'out'}"])
    record = run(settings)
    assert record["status"] == "complete" and record["metrics"]["f1"]["n"] == 3
    assert record["provenance"]["task"]["source"] == path
    [grid] = grids([record])
    assert headlines(grid) == ["f1", "exact_match", "contains"]
    assert all(name in render([record]) for name in ("method", "snapkv", "f1", "exact", "contains"))
