"""state_change: which value is the latest, what is asked, scores by hand, and runs that reuse stale notes."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from kvexp import tiny
from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.prompt import Context, bos_ids
from kvexp.run import run
from kvexp.tasks.passkey_text import NAMES, WORDS
from kvexp.tasks.questions import Question
from kvexp.tasks.state_change import INSTRUCTION, StateChange, score

NOTE = re.compile(r"\[day (\d+)\] The secret word of (\w+) is now (\w+)\.\n")


def notes_of(tokenizer, question) -> list[tuple[int, str, str]]:
    """Day, name and word of each unit; every unit is one note."""
    found = [NOTE.fullmatch(tokenizer.decode(chunk)) for chunk in question.context.chunks]
    return [(int(note[1]), note[2], note[3]) for note in found]


@pytest.mark.parametrize("order", ["time", "shuffled"])
def test_the_answer_is_the_value_of_the_latest_day(order):
    tokenizer = tiny.tokenizer()
    loaded = StateChange(n=3, order=order).load(tokenizer, seed=0)
    assert loaded.metrics == ("accuracy", "stale") and loaded.stop == ("\n",)
    assert [q.id for q in loaded.questions] == [f"{i}-{j}" for i in range(3) for j in range(8)]
    assert [q.sample for q in loaded.questions] == list(range(24))
    for at in range(0, 24, 8):
        asked = loaded.questions[at : at + 8]
        assert len({question.context.key for question in asked}) == 1
        notes = notes_of(tokenizer, asked[0])
        days = [day for day, _, _ in notes]
        assert len(set(days)) == len(days) and (days == sorted(days)) == (order == "time")
        assert len({word for _, _, word in notes}) == len(notes) == 2 * (1 + 2 + 3 + 4)
        history: dict[str, list[str]] = {}
        for _, name, word in sorted(notes):
            history.setdefault(name, []).append(word)
        for question in asked:
            words = history.pop(re.fullmatch(r"The secret word of (\w+) is now", question.query)[1])
            assert question.expected == (words[-1], *words[:-1])
            changes = len(words) - 1
            assert question.group == ("1 change" if changes == 1 else f"{changes} changes")
            assert tokenizer.decode(question.answer_ids) == f" {words[-1]}"
            assert question.max_new_tokens == max(len(word) + 1 for word in words) + 2
        assert not history
    groups = Counter(question.group for question in loaded.questions)
    assert groups == {"0 changes": 6, "1 change": 6, "2 changes": 6, "3 changes": 6}


def test_a_prompt_by_hand(words):
    (question,) = StateChange(n=1, names=1, changes=0).load(words, seed=3).questions
    ((day, name, word),) = notes_of(words, question)
    assert 1 <= day <= 9 and name in NAMES and word in WORDS and question.group == "0 changes"
    text = (
        f"{INSTRUCTION}\n[day {day}] The secret word of {name} is now {word}.\n"
        f"The secret word of {name} is now {word}"
    )
    ids = question.context.ids + question.query_ids + question.answer_ids
    assert ids == bos_ids(words) + tuple(words.encode(text, add_special_tokens=False))


def test_words_of_one_token_come_first(words):
    single = {word for word in WORDS if len(words.encode(f" {word}", add_special_tokens=False)) == 1}
    for seed in range(5):
        question = StateChange(n=1, names=2, changes=1).load(words, seed=seed).questions[0]
        assert {word for _, _, word in notes_of(words, question)} <= single


def test_draws():
    tokenizer, task = tiny.tokenizer(), StateChange(n=2)
    first = task.load(tokenizer, seed=0)
    assert task.load(tokenizer, seed=0, limit=11).questions == first.questions[:11]
    assert StateChange(n=1).load(tokenizer, seed=0).questions == first.questions[:8]
    for other in (task.load(tokenizer, seed=1), task.load(tokenizer, seed=0, split="validation")):
        assert {q.context.key for q in other.questions}.isdisjoint(q.context.key for q in first.questions)
        assert other.data_sha256 == first.data_sha256
    shuffled = StateChange(n=2, order="shuffled").load(tokenizer, seed=0)
    for a, b in zip(first.questions, shuffled.questions, strict=True):
        assert sorted(a.context.chunks) == sorted(b.context.chunks) and a.expected == b.expected
        assert a.context.chunks != b.context.chunks


@pytest.mark.parametrize(
    ("answer", "accuracy", "stale"),
    [
        (" tiger.", 1, 0),
        (' "Tiger", not moon', 1, 0),
        (" moon", 0, 1),
        ("SALT\n", 0, 1),
        ("tigers", 0, 0),
        ("the tiger", 0, 0),
        ("7", 0, 0),
        ("", 0, 0),
        ("...", 0, 0),
    ],
)
def test_answers_scored_by_hand(answer, accuracy, stale):
    question = Question("0", 0, Context((), ()), "?", (0,), ("tiger", "moon", "salt"), 3)
    assert score(question, answer) == {"accuracy": accuracy, "stale": stale}


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"n": 0}, r"task\.n=0 is too small"),
        ({"names": 0}, r"task\.names=0 is too small"),
        ({"names": 33}, r"task\.names=33 is more than there are: set task\.names=32 or less"),
        ({"changes": -1}, r"task\.changes=-1 is too small"),
        ({"names": 32, "changes": 8}, r"task\.names=32 with task\.changes=8 needs \d+ words, and there are"),
    ],
)
def test_knobs_that_cannot_be(knobs, message):
    with pytest.raises(UserError, match=message):
        StateChange(**knobs)


WORDS_OF_A_RUN = "task=state_change task.n=2 task.names=4 task.changes=1 model=tiny-llama logger=none".split()


def ran(folder, *words):
    (settings,) = settings_of([*WORDS_OF_A_RUN, f"output_dir={folder}", *words])
    return settings, run(settings)


def test_a_run_encodes_the_notes_of_a_context_once(tmp_path):
    settings, done = ran(tmp_path, "method=agentkvshift", "method.recompute=0.2", "fidelity=true")
    contexts = {q.context.key: q.context for q in settings.load_task(tiny.tokenizer()).questions}.values()
    units = Counter(chunk for context in contexts for chunk in context.chunks)
    cache, metrics = done["cache"], done["metrics"]
    assert len(contexts) == 2 and sum(units.values()) == 12
    assert cache["store_misses"] == len(units)  # eight questions, and no unit is encoded again
    assert cache["store_hits"] == sum(units.values()) - len(units)
    assert 0 < cache["reused"] < 3 * cache["unit_tokens"]
    assert metrics["stale"]["n"] == 8 and metrics["accuracy [1 change]"]["n"] == 4
    assert not metrics["stale"]["higher_is_better"] and metrics["accuracy"]["higher_is_better"]
    assert done["fidelity"]["kl"] > 1e-6 and done["fidelity"]["n"] == 8


def test_a_share_of_one_answers_as_full_does(tmp_path):
    done = ran(tmp_path, "method=agentkvshift", "method.recompute=1", "fidelity=true")[1]
    full = ran(tmp_path, "method=full", "fidelity=true")[1]
    assert done["fidelity"]["kl"] < 1e-6 and full["fidelity"]["kl"] < 1e-6
    assert done["metrics"]["logprob"]["value"] == pytest.approx(full["metrics"]["logprob"]["value"], abs=1e-3)
