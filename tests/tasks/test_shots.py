"""Demonstrations with free answers: dialogre, math_counting, gpqa_cot; and geometric shapes, a label task."""

from __future__ import annotations

import os

import pytest

from kvexp.errors import UserError
from kvexp.tasks import gpqa_cot
from kvexp.tasks.bbh_geometric_shapes import BbhGeometricShapes
from kvexp.tasks.dialogre import DialogRe, fitted, macro_f1
from kvexp.tasks.gpqa_cot import GpqaCot, chosen
from kvexp.tasks.math_answers import boxes
from kvexp.tasks.math_counting import MathCounting
from kvexp.tasks.questions import Question

DATA = os.environ.get("KVEXP_DATA_DIR")
needs_data = pytest.mark.skipif(not DATA, reason="KVEXP_DATA_DIR is not set")


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("KVEXP_DATA_DIR", raising=False)


def asked(*expected: str) -> Question:
    return Question("x", 0, None, "", (1,), expected, 8)


def dialogue(number, *relations):
    pairs = [{"x": f"Speaker {i}", "y": "Ann", "r": [r, "per:friends"]} for i, r in enumerate(relations, 1)]
    return {"dialogue": [f"Speaker 1: Hi  {number}.", "Speaker 2: Hello."], "relations": pairs}


@pytest.fixture
def dialogues(folder):
    folder("dialogre", "train", [dialogue(n, "per:boss", "per:Title") for n in range(30)] + [dialogue(99)])
    return folder("dialogre", "test", [dialogue(n, "per:boss") for n in range(28, 34)])


def test_dialogues_their_pairs_and_their_relations(words, dialogues):
    task = DialogRe(n_validation=5, context_tokens=700)
    loaded = task.load(words, seed=0, data_dir=dialogues)
    first = words.decode(loaded.context.chunks[0])
    assert first.startswith("Dialogue: Speaker 1: Hi ") and first.endswith(
        "Speaker 2: Hello.\nEntity pairs: (Speaker 1, Ann), (Speaker 2, Ann)\n"
        "The respective relations between each entity pair are: per:boss, per:title\n"
    )
    assert len(loaded.questions) == 6 and loaded.questions[0].expected == ("per:boss",)
    held = task.load(words, seed=0, split="validation", data_dir=dialogues)
    texts = [{q.query for q in part.questions} for part in (loaded, held)]
    context = words.decode(loaded.context.ids)
    assert len(held.questions) == 5 and not texts[0] & texts[1]
    assert not any(query in context for query in texts[0] | texts[1])
    traces = loaded.traces(5, "gold", 0)
    assert not {words.decode(t.query_ids) for t in traces} & (texts[0] | texts[1])
    assert not any(words.decode(t.query_ids) in context for t in traces)
    assert words.decode(traces[0].answer_ids) == " per:boss, per:title\n"
    with pytest.raises(UserError, match=r"is more than the \d+ traces of task=dialogre"):
        loaded.traces(100, "gold", 0)
    assert loaded.data_sha256 == task.data_sha256(dialogues)
    other = task.load(words, seed=1, data_dir=dialogues)
    assert other.context.key != loaded.context.key and len(other.questions) == 6


GOLDEN = [  # answer, expected, (accuracy, pair_accuracy)
    (" per:boss, per:title", ("per:boss", "per:title"), (1, 1)),
    ("PER:BOSS,per:title ", ("per:boss", "per:title"), (1, 1)),
    ("per:boss", ("per:boss", "per:title"), (0, 0.5)),
    ("per:boss, per:title, per:age", ("per:boss", "per:title"), (1, 1)),  # what is too much is cut
    ("per:title, per:boss", ("per:boss", "per:title"), (0, 0)),
    ("", ("per:boss",), (0, 0)),
]


@pytest.mark.parametrize(("answer", "expected", "right"), GOLDEN)
def test_relations_are_compared_in_order(answer, expected, right):
    found = DialogRe().score(asked(*expected), answer)
    assert (found["accuracy"], found["pair_accuracy"]) == right


def test_macro_f1_is_over_all_pairs():
    """boss: 1 of 2 found, none too much: F1 2/3. title: all found, 1 too much: 2/3. unknown: 0."""
    samples = [
        {"answer": "boss, title", "expected": ["boss", "title"]},
        {"answer": "title", "expected": ["boss", "x"]},
    ]
    assert fitted("title", ["boss", "x"]) == ["title", "unknown"]
    assert macro_f1(samples)["macro_f1"]["value"] == pytest.approx((2 / 3 + 2 / 3 + 0 + 0) / 4)


def problem(number):
    return {
        "question": f"What is {number} and\n\n1?",
        "answer": str(number + 1),
        "solution": f"We add.\n\nIt is $\\boxed{{{number + 1}}}$.",
        "level": "Level 2",
    }


def test_problems_with_solutions(words, folder):
    folder(
        "math_counting_and_probability",
        "train",
        [problem(n) for n in range(40)] + [{**problem(70), "solution": "?"}],
    )
    data = folder("math_counting_and_probability", "test", [problem(n) for n in range(50, 55)])
    loaded = MathCounting(n_validation=5, context_tokens=800).load(words, seed=0, data_dir=data)
    chunk = words.decode(loaded.context.chunks[0])
    assert (
        chunk.startswith("Problem: What is ") and "and\n\n1?\nSolution: We add.\n\nIt is $\\boxed{" in chunk
    )
    question = loaded.questions[0]
    assert question.group == "Level 2" and loaded.stop == ("\nProblem:",)
    gold = words.decode(question.answer_ids)
    assert loaded.score(question, gold) == {"accuracy": 1.0, "first_box": 1.0}


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}", (1, 1)),
        (r"so \boxed{0.5}", r"\frac{1}{2}", (1, 0)),  # the same in meaning, not letter for letter
        (r"\boxed{3}, no: \boxed{4}", "4", (1, 0)),  # the last box, and the first
        (r"\boxed{4}, no: \boxed{3}", "4", (0, 1)),
        (r"\boxed{4", "4", (1, 0)),  # left open: the last number
        ("no idea", "4", (0, 0)),
    ],
)
def test_answers_of_problems(answer, gold, right):
    found = MathCounting().score(asked(gold), answer)
    assert (found["accuracy"], found["first_box"]) == right


def test_boxes_in_their_order():
    assert boxes(r"\boxed{a {b}} and \fbox{ } \boxed{\boxed{c}} \boxed{d") == ["a {b}", "", r"\boxed{c}", "c"]


def record(number, explanation="Because."):
    wrong = {f"Incorrect Answer {i}": f"no {i}" for i in (1, 2, 3)}
    return {"Question": f"Made up {number}?", "Correct Answer": "yes", **wrong, "Explanation": explanation}


@pytest.fixture
def hub(monkeypatch):
    sets = {
        "gpqa_diamond": [record(n) for n in range(4)],
        "gpqa_extended": [record(n, "" if n == 9 else "Because.") for n in range(2, 30)],
    }
    monkeypatch.setattr(gpqa_cot, "hub_rows", lambda source, config: sets[config])


def test_questions_of_the_hub_are_asked_and_not_kept(words, hub, folder):
    data = folder("gpqa_cot", "test", [{"question": "stored"}])  # a data folder has no part in it
    loaded = GpqaCot(n_validation=5, context_tokens=900).load(words, seed=0, data_dir=data)
    assert len(loaded.questions) == 4 and all(q.query == "(not kept)" for q in loaded.questions)
    asked_text = [words.decode(q.query_ids) for q in loaded.questions]
    assert all(text.startswith("Question: Made up ") and text.endswith("\nAnswer:") for text in asked_text)
    context = words.decode(loaded.context.ids)
    for question, text in zip(loaded.questions, asked_text, strict=True):
        assert f"({question.expected[0]}) yes" in text  # the letter of the right option
        assert text.split("\n")[0] not in context  # the test is in no demonstration
    assert "Because.\nThe answer is (" in context
    assert len({q.expected for q in loaded.questions}) > 1 or len(loaded.questions) < 3


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (B).", "B"),
        ("the answer is b", "B"),
        ("It is (A)? No. The answer is: (A). Rather, the answer is **(C)**.", "C"),
        ("Options (A) and (D); I take (D)", "D"),
        ("B", None),
        ("", None),
    ],
)
def test_the_letter_that_an_answer_ends_on(text, letter):
    assert chosen(text) == letter


def test_a_set_that_cannot_be_read_is_one_sentence(monkeypatch, words):
    datasets = pytest.importorskip("datasets")

    def gated(*args, **more):
        raise RuntimeError("gated\nin two lines")

    monkeypatch.setattr(datasets, "load_dataset", gated)
    with pytest.raises(UserError, match=r"cannot be read from the hub \(gated\): ask its authors for access"):
        GpqaCot().load(words, seed=0)


def test_shapes_are_labels_and_keep_their_lines(words, folder):
    rows = [
        {
            "index": n,
            "question": f"Path {n} draws a\nOptions:\n(A) line\n(B) kite",
            "answer": "(A)" if n % 2 else "(B)",
        }
        for n in range(40)
    ]
    folder("bbh_geometric_shapes", "train", rows[:30])
    data = folder("bbh_geometric_shapes", "test", rows[30:])
    loaded = BbhGeometricShapes(n_validation=5, n_calibration=5, context_tokens=500).load(
        words, seed=0, data_dir=data
    )
    assert loaded.labels == ("(A)", "(B)") and len(loaded.documents) == 10
    assert loaded.documents[0].query.endswith(" draws a\nOptions:\n(A) line\n(B) kite\nTarget:")
    assert words.decode(loaded.answer_ids[1]) == " (B)\n"


def test_the_hub_s_list_of_shapes_is_parted(monkeypatch, words):
    rows = [{"question": f"Path {n}", "answer": "(A)" if n % 2 else "(B)"} for n in range(250)]
    monkeypatch.setattr("kvexp.tasks.datasets._read_hub", lambda name, split, source: list(rows))
    task = BbhGeometricShapes()
    train, test = ({row.text for row in task._rows(split, None)} for split in ("train", "test"))
    assert (len(train), len(test)) == (150, 100) and not train & test


@needs_data
@pytest.mark.parametrize(
    ("task", "asked", "held"),
    [(DialogRe(), 295, 50), (MathCounting(), 466, 50), (BbhGeometricShapes(), 100, 20)],
)
def test_real_data(words, task, asked, held):
    loaded = task.load(words, seed=0, data_dir=DATA, limit=3)
    validation = task.load(words, seed=0, split="validation", data_dir=DATA, limit=3)
    some = [getattr(part, "questions", None) or part.documents for part in (loaded, validation)]
    assert not {one.query for one in some[0]} & {one.query for one in some[1]}
    assert len(loaded.context.chunks) >= 4 and loaded.traces(20, "gold", 0)
