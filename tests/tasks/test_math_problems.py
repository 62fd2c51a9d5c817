"""aime24, aime25 and math500: prompts, cuts, lengths, rows of a folder and of the hub, scores."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from kvexp import tiny
from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.prompt import encode
from kvexp.tasks.aime24 import Aime24
from kvexp.tasks.aime25 import Aime25
from kvexp.tasks.math500 import Math500
from kvexp.tasks.questions import QuestionSet

DATA = os.environ.get("KVEXP_DATA_DIR")
needs_data = pytest.mark.skipif(not DATA, reason="KVEXP_DATA_DIR is not set")
ROWS = [
    {"id": "a", "question": "What is $1+1$?\n", "answer": "2", "subject": "Algebra", "level": 3},
    {"id": "b", "question": "Half of one?", "answer": r"\frac{1}{2}", "subject": "Prealgebra", "level": 1},
    {"question": "é?", "answer": "(0,1]"},
]
TEMPLATE = (
    "{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture
def data(folder):
    folder("aime24", "test", [{"question": "How many?", "answer": "025"}])
    return folder("math500", "test", ROWS)


def whole(question):
    return question.context.ids + question.query_ids


def test_the_plain_prompt(words, data):
    loaded = Math500().load(words, seed=0, data_dir=data)
    assert isinstance(loaded, QuestionSet) and loaded.metrics == ("accuracy",) and loaded.stop == ()
    first = loaded.questions[0]
    text = words.decode(whole(first))
    instruction, problem, end = text.split("\n\n")
    assert instruction.startswith("<s>Solve") and "step by step" in instruction and r"\boxed{}" in instruction
    assert (problem, end) == ("Problem: What is $1+1$?", "Solution:")
    assert first.expected == ("2",) and first.answer_ids == ()
    assert [q.id for q in loaded.questions] == ["a", "b", "test-2"]
    assert [q.sample for q in loaded.questions] == [0, 1, 2]
    assert [q.group for q in loaded.questions] == ["Algebra/3", "Prealgebra/1", ""]


@pytest.mark.parametrize("prompt", ["plain", "chat"])
def test_a_prompt_is_cut_before_its_last_token(data, prompt):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    for question in Math500(prompt=prompt).load(tokenizer, seed=0, data_dir=data).questions:
        ids, bos = whole(question), (tokenizer.bos_token_id,) * (prompt == "plain")
        assert question.context.header == bos
        assert ids == bos + tuple(encode(tokenizer, tokenizer.decode(ids[len(bos) :])))
        assert len(question.query_ids) == 1 and question.query == tokenizer.decode(question.query_ids)
        assert len(ids) + question.max_new_tokens == 8192


def test_a_chat_uses_the_template(data):
    tokenizer = tiny.tokenizer()
    with pytest.raises(UserError, match=r"has no chat template: set task\.prompt=plain$"):
        Math500(prompt="chat").load(tokenizer, seed=0, data_dir=data)
    tokenizer.chat_template = TEMPLATE
    first = Math500(prompt="chat").load(tokenizer, seed=0, data_dir=data).questions[0]
    text = tokenizer.decode(whole(first))
    assert text.startswith("<u>Solve") and text.endswith("\n\nProblem: What is $1+1$?</u><a>")


def test_a_template_that_writes_the_bos_gives_it_once(data):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ bos_token }}" + TEMPLATE
    first = Math500(prompt="chat").load(tokenizer, seed=0, data_dir=data).questions[0]
    assert first.context.header == (tokenizer.bos_token_id,)
    assert whole(first).count(tokenizer.bos_token_id) == 1


def test_lengths(words, data):
    length = len(whole(Math500().load(words, seed=0, data_dir=data).questions[0]))
    tight = Math500(max_total_tokens=length + 1, n=1).load(words, seed=0, data_dir=data)
    assert tight.questions[0].max_new_tokens == 1
    with pytest.raises(UserError, match=rf"of {length} tokens: set task\.max_total_tokens={length + 1024}"):
        Math500(max_total_tokens=length, n=1).load(words, seed=0, data_dir=data)
    assert Aime24().max_total_tokens == Aime25().max_total_tokens == 32768


def test_first_problems(words, data):
    def ids(task, **given):
        return [q.id for q in task.load(words, data_dir=data, **given).questions]

    assert ids(Math500(n=2), seed=0) == ids(Math500(), seed=5, limit=2) == ["a", "b"]
    assert ids(Math500(n=2), seed=0, limit=1) == ["a"]
    with pytest.raises(UserError, match=r"task\.n=4 is more than there are: set task\.n=3 or less"):
        ids(Math500(n=4), seed=0)
    with pytest.raises(UserError, match=r"task=math500 has no split=validation: leave split out"):
        ids(Math500(), seed=0, split="validation")


def test_the_hash_names_the_data(words, data, folder):
    def sha(task=Math500):
        assert task().load(words, seed=0, data_dir=data).data_sha256 == task().data_sha256(data)
        return task().data_sha256(data)

    before = sha()
    assert Math500(n=1).load(words, seed=0, data_dir=data).data_sha256 == before
    folder("math500", "test", [{**ROWS[0], "answer": "3"}, *ROWS[1:]])
    assert sha() != before != sha(Aime24)
    assert Math500().data_sha256(None) is None and Aime25().data_sha256(data) is None


def test_scores(words, data):
    aime = Aime24().load(words, seed=0, data_dir=data)
    for text, accuracy in (
        (r"\boxed{25}", 1.0),
        ("so it is 25.", 1.0),
        (r"\boxed{2500}", 0.0),
        (r"\boxed{0.25}", 0.0),
        ("I do not know", 0.0),
    ):
        assert aime.score(aime.questions[0], text) == {"accuracy": accuracy}
    loaded = Math500().load(words, seed=0, data_dir=data)
    half, interval = loaded.questions[1:]
    assert loaded.score(half, r"It is $0.5$, thus \boxed{0.5}") == {"accuracy": 1.0}
    assert loaded.score(half, r"\boxed{5}") == {"accuracy": 0.0}
    assert loaded.score(interval, r"\boxed{\left(0, 1\right]}") == {"accuracy": 1.0}
    assert loaded.score(interval, "") == {"accuracy": 0.0}


def test_the_hub(words, monkeypatch):
    """Columns have other names there, one set is called train, and numbers may stand for text."""
    tables = {
        "HuggingFaceH4/aime_2024": [{"id": 60, "problem": "p", "answer": 204, "solution": "s"}],
        "math-ai/aime25": [{"problem": "p", "answer": "70", "id": "0"}],
        "HuggingFaceH4/MATH-500": [
            {"problem": "p", "answer": "3", "unique_id": "u", "subject": "Geometry", "level": 2}
        ],
    }
    splits = {}

    class Table(list):
        features = {column: None for rows in tables.values() for column in rows[0]}  # noqa: RUF012

    def load_dataset(name, config, split):
        splits[name] = split
        return Table(tables[name])

    monkeypatch.delenv("KVEXP_DATA_DIR", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    found = {task: task().load(words, seed=0).questions[0] for task in (Aime24, Aime25, Math500)}
    assert list(splits.values()) == ["train", "test", "test"]
    assert [q.expected for q in found.values()] == [("204",), ("70",), ("3",)]
    assert [q.id for q in found.values()] == ["60", "0", "u"]
    assert [q.group for q in found.values()] == ["", "", "Geometry/2"]


@pytest.mark.parametrize("name", ["aime24", "aime25", "math500"])
def test_knobs_on_the_command_line(name):
    task = settings_of(["method=full", f"task={name}", "task.n=3", "task.prompt=chat"])[0].task
    assert (task.id, task.n, task.prompt) == (name, 3, "chat")
    with pytest.raises(UserError, match=r"task\.n=0 is too small"):
        settings_of(["method=full", f"task={name}", "task.n=0"])


@needs_data
@pytest.mark.parametrize(("task", "at_least"), [(Aime24, 30), (Aime25, 15), (Math500, 400)])
def test_published_rows(words, task, at_least):
    loaded = task().load(words, seed=0, data_dir=DATA)
    assert len(loaded.questions) >= at_least
    assert len({q.id for q in loaded.questions}) == len(loaded.questions)
    for question in loaded.questions:
        assert loaded.score(question, rf"\boxed{{{question.expected[0]}}}") == {"accuracy": 1.0}
