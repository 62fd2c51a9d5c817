"""RULER as a whole: knobs, lengths, exact prefixes, what a seed draws, and the metric."""

from __future__ import annotations

import pytest

from kvexp import tiny
from kvexp.errors import UserError
from kvexp.prompt import Context, bos_ids
from kvexp.tasks.questions import Question
from kvexp.tasks.ruler import GENERATED, SUBTASKS, Ruler, new_tokens, score
from kvexp.tasks.texts import Text

LENGTH = 8192  # a solved example of cwe alone takes 2,000 tokens of these tokenizers


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("KVEXP_DATA_DIR", raising=False)


@pytest.fixture(scope="session")
def prose(tmp_path_factory) -> str:
    """A text of 400 sentences that hides needles."""
    path = tmp_path_factory.mktemp("prose") / "walk.txt"
    path.write_text("".join(f"On day {i} we walked on. Nobody knew why.\n" for i in range(200)))
    return str(path)


@pytest.fixture(scope="session")
def loaded(words, prose):
    return Ruler(length=LENGTH, n=2, haystack=prose).load(words, seed=0, data_dir="/nowhere")


def text_of(tokenizer, question) -> str:
    return tokenizer.decode(question.context.ids[len(bos_ids(tokenizer)) :])


def test_every_subtask_comes_once_a_round(loaded):
    assert len(GENERATED) == 11 and len(SUBTASKS) == 13
    assert [question.group for question in loaded.questions] == list(GENERATED) * 2
    assert [question.sample for question in loaded.questions] == list(range(22))
    assert [question.id for question in loaded.questions[::11]] == ["niah_single_1-0", "niah_single_1-1"]
    assert loaded.metrics == ("match",) and loaded.stop == () and len(loaded.data_sha256) == 64
    assert loaded.notes["words"] == "generated"


def test_lengths_are_met_and_never_exceeded(loaded):
    for question in loaded.questions:
        length = len(question.context) + len(question.query_ids) + question.max_new_tokens
        assert 0.95 * LENGTH <= length <= LENGTH, question.id


def test_new_tokens_are_those_of_the_paper():
    assert [new_tokens(name) for name in ("niah_single_1", "niah_multiquery")] == [128, 128]
    assert [new_tokens(name) for name in ("vt", "cwe", "fwe", "qa_squad")] == [30, 120, 50, 32]


@pytest.mark.parametrize("tokenizer", ["words", "marking", "bytes"])
def test_the_context_is_an_exact_prefix_of_the_prompt(request, tokenizer, prose):
    tokenizer = tiny.tokenizer() if tokenizer == "bytes" else request.getfixturevalue(tokenizer)
    header = bos_ids(tokenizer)
    for question in Ruler(length=4095, n=1, haystack=prose).load(tokenizer, seed=1).questions:
        text = text_of(tokenizer, question)
        assert question.context.header == header and question.query_ids
        whole = tokenizer.encode(text + question.query, add_special_tokens=False)
        assert [*question.context.ids[len(header) :], *question.query_ids] == whole, question.id
        assert text.endswith("\n") and question.query.startswith(("What ", "Question: "))


def test_the_answer_that_is_taught_is_right(loaded, words):
    for question in loaded.questions:
        answer = words.decode(question.answer_ids)
        assert score(question, answer) == {"match": 1.0} and answer.startswith(" ")
        counted = [f"{i}. {word}" for i, word in enumerate(question.expected, 1)]
        joined = {"niah": ", ".join(question.expected), "cwe": " ".join(counted)}
        assert answer[1:] == joined.get(question.group.split("_")[0], " ".join(question.expected))


def test_a_sample_depends_on_nothing_but_seed_split_and_number(words, prose):
    task = Ruler(subtask="niah_single_2,vt", length=2048, n=3, haystack=prose)
    first = task.load(words, seed=3)
    assert first.questions == task.load(words, seed=3).questions
    assert task.load(words, seed=3, limit=3).questions == first.questions[:3]
    alone = Ruler(subtask="vt", length=2048, n=1, haystack=prose).load(words, seed=3).questions[0]
    assert alone.context == first.questions[1].context and alone.expected == first.questions[1].expected
    contexts = {question.context.key for question in first.questions}
    for other in (task.load(words, seed=4), task.load(words, seed=3, split="validation")):
        assert not contexts & {question.context.key for question in other.questions}
        assert other.data_sha256 == first.data_sha256
    longer = Ruler(subtask="niah_single_2", length=4096, n=1, haystack=prose).load(words, seed=3)
    assert longer.questions[0].expected == first.questions[0].expected


def test_the_haystack_is_stdlib_where_no_essays_are(words, monkeypatch):
    monkeypatch.setattr("kvexp.tasks.ruler.load_texts", lambda source, data_dir: [Text(source, source)])
    loaded = Ruler(subtask="niah_single_2", n=1, length=1024).load(words, seed=0)
    assert loaded.notes["haystack"] == "stdlib" and "stdlib stdlib" in text_of(words, loaded.questions[0])


def test_no_haystack_is_read_where_none_is_needed(words):
    assert Ruler(subtask="vt", n=1, length=1024).load(words, seed=0).notes["haystack"] is None
    with pytest.raises(UserError, match="no texts are called nowhere"):
        Ruler(subtask="niah_single_2", haystack="nowhere").load(words, seed=0)


def test_essays_of_the_data_folder_hide_needles(words, folder):
    data_dir = folder("ruler", "essays", [{"file": "a.txt", "text": "Startups  are\nhard. They are."}])
    loaded = Ruler(subtask="niah_single_2", n=1, length=1024).load(words, seed=0, data_dir=data_dir)
    assert loaded.notes["haystack"] == "essays"
    assert text_of(words, loaded.questions[0]).count("Startups are hard. They are.") > 10


def question(group: str, *expected: str) -> Question:
    return Question("0", 0, Context((), ()), "?", (0,), expected, 8, group)


@pytest.mark.parametrize(
    ("group", "expected", "answer", "match"),
    [
        ("niah_multivalue", ("12", "34", "56", "78"), " 12, 56 and 99.", 0.5),
        ("niah_single_1", ("7654321",), "It is 7654321", 1.0),
        ("niah_single_1", ("7654321",), "It is 765432", 0.0),
        ("vt", ("ABCDE", "FGHIJ"), "abcde fghij", 1.0),
        ("cwe", ("art", "cat", "dog"), "1. party 2. Cat", 2 / 3),
        ("qa_squad", ("in 1066", "1066", "year 1066"), "It was 1066.", 1.0),
        ("qa_hotpot", ("Paris", "the city"), "the City of Rome", 1.0),
        ("qa_hotpot", ("Paris", "the city"), "", 0.0),
        ("vt", ("Paris", "the city"), "the City of Rome", 0.5),
    ],
)
def test_answers_scored_by_hand(group, expected, answer, match):
    assert score(question(group, *expected), answer) == {"match": pytest.approx(match)}


def test_subtasks_can_be_listed():
    assert Ruler().subtasks == GENERATED and Ruler(subtask="all13").subtasks == SUBTASKS
    assert Ruler(subtask="vt, cwe,vt").subtasks == ("vt", "cwe")
    assert Ruler(subtask="qa_squad,all").subtasks == ("qa_squad", *GENERATED)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"subtask": "niah_single"}, "did you mean 'niah_single_"),
        ({"subtask": "vt,,cwe"}, "task.subtask= is none of"),
        ({"length": 100}, r"task\.length=100 is too small: set task\.length=256"),
        ({"n": 0}, r"task\.n=0 is too small"),
        ({"depths": ()}, "set task.depths=\\[0,50,100\\]"),
        ({"depths": (50, 101)}, "is a list of percentages"),
    ],
)
def test_knobs_that_cannot_be(knobs, message):
    with pytest.raises(UserError, match=message):
        Ruler(**knobs)


def test_a_length_without_room_is_told(words):
    with pytest.raises(UserError, match=r"holds only 0 of 20 samples of cwe.* set task\.length=8192"):
        Ruler(subtask="cwe").load(words, seed=0)
    with pytest.raises(UserError, match="split=train is none of test, validation"):
        Ruler(subtask="vt").load(words, seed=0, split="train")
    with pytest.raises(UserError, match="limit=0"):
        Ruler(subtask="vt").load(words, seed=0, limit=0)
