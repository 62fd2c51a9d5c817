"""LiCoMemory: the graph leads from a question to chunks; sessions, age and neighbours change their order."""

from __future__ import annotations

import json
import math

import pytest

from kvexp.errors import UserError
from kvexp.notes.licomemory import LiCoMemory
from kvexp.notes.units import Ask, Notes, Turn

PLAIN = {"tokens": 1, "session_weight": 0.0, "beside": 0.0}
"""A turn a chunk, and triples alone."""


def filled(kind: LiCoMemory, *turns: Turn, ask: Ask | None = None) -> Notes:
    notes = kind.open(ask)
    for turn in turns:
        notes.add(turn)
    return notes


def turns(*said: str, session: str = "1", day: float | None = None) -> list[Turn]:
    return [Turn(f"D{session}:{i}", "Ann", text, "", session, day) for i, text in enumerate(said)]


def ids(notes: Notes, query: str, k: int) -> list[str]:
    return [unit.id for unit in notes.retrieve(query, k)]


def test_a_question_leads_to_the_chunks_of_its_entities():
    notes = filled(
        LiCoMemory(**PLAIN), *turns("Bob visited the museum.", "The cat sleeps.", "We saw a museum of art.")
    )
    # Both chunks have one triple with "museum"; that of the first is shorter by a word.
    assert ids(notes, "Which museum?", 2) == ["D1:0", "D1:2"]
    assert ids(notes, "cats", 1) == ["D1:1"]


def test_words_that_are_no_entitys_lead_nowhere():
    notes = filled(LiCoMemory(**PLAIN), *turns("Bob visited the museum.", "The cat sleeps."))
    # "visited" is a relation: no entity, so nothing is found, and the latest stand in.
    assert ids(notes, "visited", 2) == ["D1:1", "D1:0"]


def test_a_chunk_sums_its_three_best_triples():
    one = filled(LiCoMemory(**PLAIN), *turns("red fox.", "red fox, red fox, red fox, red fox."))
    scores = one.growing._by_triples("red fox")  # type: ignore[attr-defined]
    assert list(scores) == [0]  # the open chunk is not in the graph
    one.growing.close()  # type: ignore[attr-defined]
    scores = one.growing._by_triples("red fox")  # type: ignore[attr-defined]
    assert scores[1] / scores[0] == pytest.approx(1 + 1 / 2 + 1 / 3)


def test_a_session_adds_its_own_score():
    said = [*turns("red fox"), *turns("red fox", "Apples, pears and plums", "plums", session="2")]
    query = "plums, red fox?"
    assert ids(filled(LiCoMemory(**PLAIN), *said), "red fox", 2) == ["D1:0", "D2:0"]
    with_sessions = filled(LiCoMemory(tokens=1, beside=0.0, session_weight=0.9), *said)
    # Session 2 holds all words of the question; its chunks go before that of the first session.
    assert ids(with_sessions, query, 4)[-1] == "D1:0"


def test_a_chunk_lends_to_those_beside_it_in_its_session():
    said = [*turns("Hello.", "The museum.", "Lovely."), *turns("So.", "Bye.", session="2")]
    notes = filled(LiCoMemory(tokens=1, session_weight=0.0), *said)
    assert ids(notes, "museum", 4) == ["D1:1", "D1:0", "D1:2", "D2:1"]


def test_age_counts_by_the_typical_gap():
    # Gaps of 2, 2 and 6 days: 2 is typical, so the chunks are 5, 4, 3 and 0 gaps old.
    said = [
        one
        for i, day in enumerate((0.0, 2.0, 4.0, 10.0))
        for one in turns("red fox", session=str(i), day=day)
    ]
    notes = filled(LiCoMemory(decay=0.5), *said)
    notes.growing.close()  # type: ignore[attr-defined]
    ages = [-math.log(notes.growing._recency(i)) for i in range(4)]  # type: ignore[attr-defined]
    assert ages == pytest.approx([5**0.5, 2.0, 3**0.5, 0.0])
    assert ids(notes, "red fox", 4) == ["D3:0", "D2:0", "D1:0", "D0:0"]
    assert ids(filled(LiCoMemory(), *said), "red fox", 4) == ["D0:0", "D1:0", "D2:0", "D3:0"]


def test_summaries_come_first_and_beside_the_units():
    said = [*turns("The red fox sleeps."), *turns("A blue whale sings.", session="2")]
    units = filled(LiCoMemory(summaries=1), *said).retrieve("whale", 1)
    assert [unit.id for unit in units] == ["summary D2:0", "D2:0"]
    assert units[0].text == "Summary: Ann: A blue whale sings.\n"


def test_asking_changes_nothing_and_a_name_stands_for_one_text():
    said = [
        Turn(
            f"D{i // 6}:{i}",
            "Bob",
            f"word{i % 7} visited thing{i % 3} and place{i}",
            f"day {i // 6}",
            str(i // 6),
        )
        for i in range(20)
    ]
    kind = LiCoMemory(tokens=40, summaries=2)
    batch, asked = kind.open(), kind.open()
    seen: dict[str, str] = {}
    for turn in said:
        batch.add(turn)
        asked.add(turn)
        for unit in asked.retrieve("word3 place12", 4):
            assert seen.setdefault(unit.id, unit.text) == unit.text
    units = batch.retrieve("word2 thing1", 40)
    assert asked.retrieve("word2 thing1", 40) == units
    chunks = [unit for unit in units if not unit.id.startswith("summary")]
    assert sorted(source for unit in chunks for source in unit.sources) == sorted(turn.id for turn in said)


def test_a_language_model_finds_triples_and_writes_summaries():
    def ask(prompt: str) -> str:
        if prompt.startswith("List"):
            return json.dumps([["Ann", "has", "a zebra"]] if "stripes" in prompt else [])
        return "They talked."

    notes = filled(LiCoMemory(**PLAIN, summaries=1), *turns("It has stripes.", "Oh.", "Yes."), ask=ask)
    assert [unit.text for unit in notes.retrieve("zebra", 1)] == ["Ann: It has stripes.\n"]
    assert notes.retrieve("stripes", 1)[0].text == "Summary: They talked.\n"


def test_what_is_asked_is_not_copied():
    class Counting:
        calls = 0

        def __call__(self, prompt: str) -> str:
            self.calls += 1
            return "[]" if prompt.startswith("List") else "x"

    ask = Counting()
    filled(LiCoMemory(), *turns("One."), ask=ask).retrieve("x", 1)
    assert ask.calls == 2  # triples of the chunk and the summary of the session


def test_an_answer_without_triples_is_refused():
    with pytest.raises(UserError, match="asked for triples"):
        filled(LiCoMemory(), *turns("One."), ask=lambda prompt: "no").retrieve("x", 1)


def test_knobs_have_ranges():
    with pytest.raises(UserError, match=r"notes\.tokens=0 is too small"):
        LiCoMemory(tokens=0)
    with pytest.raises(UserError, match=r"notes\.beside=-1 is no share"):
        LiCoMemory(beside=-1)
