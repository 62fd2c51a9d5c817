"""Questions for reading: their rows, which paragraphs stand around them, and how they fit."""

from __future__ import annotations

import random
import re
import sys
from types import SimpleNamespace

import pytest

from kvexp.errors import UserError
from kvexp.tasks.ruler import Ruler
from kvexp.tasks.ruler_material import load_templates, load_words
from kvexp.tasks.ruler_parts import Material
from kvexp.tasks.ruler_qa import Asked, Reading, load_reading, recipe


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("KVEXP_DATA_DIR", raising=False)


def row(i: int, paragraphs: int = 2, title: str = "") -> dict:
    context = [f"Paragraph {i}.{j} tells of number {i}." for j in range(paragraphs)]
    return {
        "question": f"Who is {i}?",
        "context": context,
        "answers": [f"number {i}", f"{i}"],
        "title": title,
    }


def asked(i: int, title: str = "") -> Asked:
    given = row(i, title=title)
    return Asked(given["question"], tuple(given["context"]), tuple(given["answers"]), title)


READING = Reading(tuple(asked(i, title="odd" if i % 2 else "even") for i in range(10)))
MATERIAL = Material(load_templates(), load_words("/nowhere"), (), None, 4096)


def documents(context: str) -> list[str]:
    """The documents of a prompt, whose numbers must count up."""
    found = re.findall(r"Document (\d+):\n(.*)", context)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [text for _, text in found]


def test_a_prompt_has_its_own_paragraphs_among_others():
    made = recipe(READING, READING.rows[3], MATERIAL, random.Random(0))
    assert (made.low, made.high) == (2, 20)
    for n in range(2, 21):
        sample = made.render(n)
        found = documents(sample.context)
        assert len(found) == len(set(found)) == n and set(READING.rows[3].paragraphs) <= set(found)
        assert sample.query == "Question: Who is 3? Answer:" and sample.expected == ("number 3", "3")
        assert sample.answer == " number 3"
        assert sample.context.startswith("Answer the question based on the given documents.")
        assert set(documents(made.render(max(n - 1, 2)).context)) <= set(found)


def test_paragraphs_of_the_same_article_come_first():
    made = recipe(READING, READING.rows[3], MATERIAL, random.Random(1))
    near = {paragraph for other in READING.rows if other.title == "odd" for paragraph in other.paragraphs}
    assert set(documents(made.render(10).context)) == near
    assert set(documents(made.render(6).context)) < near
    assert not set(documents(made.render(12).context)) <= near


def test_own_paragraphs_lie_anywhere():
    own = READING.rows[3].paragraphs[0]
    places = {
        documents(recipe(READING, READING.rows[3], MATERIAL, random.Random(s)).render(10).context).index(own)
        for s in range(200)
    }
    assert places == set(range(10))


def test_splits_share_no_question():
    test, validation = (READING.order(split, random.Random(0)) for split in ("test", "validation"))
    assert {row.question for row in validation} == {"Who is 4?", "Who is 9?"}
    assert len(test) == 8 and not set(test) & set(validation)
    assert test != READING.order("test", random.Random(1))
    assert set(test) == set(READING.order("test", random.Random(1)))


def test_rows_of_the_data_folder(words, folder):
    rows = [row(i) for i in range(60)]
    data_dir = folder("ruler", "squad", [{k: v for k, v in r.items() if k != "title"} for r in rows])
    assert load_reading("squad", data_dir).rows[7] == asked(7)
    loaded = Ruler(subtask="qa_squad", length=1024, n=5).load(words, seed=0, data_dir=data_dir)
    assert len(loaded.questions) == 5
    for question in loaded.questions:
        length = len(question.context) + len(question.query_ids) + 32
        assert 0.9 * 1024 <= length <= 1024
        number = re.search(r"Who is (\d+)", question.query)[1]
        assert question.expected == (f"number {number}", number)
        assert words.decode(question.context.ids).count(f"tells of number {number}.") == 2
        assert loaded.score(question, f"It is {number}.") == {"match": 1.0}
    changed = folder("ruler", "squad", [{**r, "title": "Numbers"} for r in rows])
    again = Ruler(subtask="qa_squad", length=1024, n=5).load(words, seed=0, data_dir=changed)
    assert again.data_sha256 != loaded.data_sha256


def test_questions_whose_paragraphs_do_not_fit_are_left_out(words, folder):
    rows = [row(i, paragraphs=2 if i % 2 else 60) for i in range(20)]
    data_dir = folder("ruler", "hotpot", rows)
    loaded = Ruler(subtask="qa_hotpot", length=600, n=8).load(words, seed=0, data_dir=data_dir)
    assert {int(re.search(r"\d+", question.query)[0]) % 2 for question in loaded.questions} == {1}
    with pytest.raises(UserError, match=r"task\.length=600 holds only 8 of 9 .* set task\.n=8 or less"):
        Ruler(subtask="qa_hotpot", length=600, n=9).load(words, seed=0, data_dir=data_dir)


@pytest.mark.parametrize("change", [{"context": "text"}, {"answers": []}, {"question": 3}, {"title": None}])
def test_rows_that_lack_a_field(folder, change):
    with pytest.raises(UserError, match="has a row without question, context"):
        load_reading("squad", folder("ruler", "squad", [row(0) | change]))


def test_rows_of_the_hub(monkeypatch):
    squad = {"title": "T", "context": "C c.", "question": "Q?", "answers": {"text": ["a", "a", "b"]}}
    context = {"title": ["A", "B"], "sentences": [["One.", " Two."], ["Three."]]}
    hotpot = {"question": "Q?", "answer": "yes", "context": context}
    asked_for = []

    def load_dataset(hub_id, config, split):
        asked_for.append((hub_id, config, split))
        return [squad if "squad" in hub_id else hotpot]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert load_reading("squad", None).rows == (Asked("Q?", ("C c.",), ("a", "b"), "T"),)
    assert load_reading("hotpot", None).rows == (Asked("Q?", ("A\nOne. Two.", "B\nThree."), ("yes",)),)
    assert asked_for == [
        ("rajpurkar/squad", None, "validation"),
        ("hotpotqa/hotpot_qa", "distractor", "validation"),
    ]


def test_a_hub_that_cannot_be_read(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("no network\nat all")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(UserError, match=r"hub \(no network\): set data_dir=PATH .*hotpot\.jsonl\.gz"):
        load_reading("hotpot", None)
