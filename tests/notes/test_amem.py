"""A-MEM: what a note says, what it is linked with, which notes are found, and a language model's answers."""

from __future__ import annotations

import json

import pytest

from kvexp.errors import UserError
from kvexp.notes.amem import AMem
from kvexp.notes.units import Ask, Notes, Turn

PUPPY = Turn("D1:1", "Ann", "I adopted a puppy", "May", "1")
BEACH = Turn("D1:2", "Ann", "The puppy likes the beach", "May", "1")


def filled(kind: AMem, *turns: Turn, ask: Ask | None = None) -> Notes:
    notes = kind.open(ask)
    for turn in turns:
        notes.add(turn)
    return notes


def ids(notes: Notes, query: str, k: int) -> list[str]:
    return [unit.id for unit in notes.retrieve(query, k)]


def test_a_note_says_keywords_context_and_tags():
    # Of the second note "likes" and "beach" are new, "puppy" is not; the first is near and has "adopted" too.
    first, second = filled(AMem(), PUPPY, BEACH).retrieve("adopted", 2)
    assert (
        first.text
        == "[May] Ann: I adopted a puppy | context: Ann about adopted and puppy | keywords: adopted, puppy\n"
    )
    assert second.text == (
        "[May] Ann: The puppy likes the beach | context: Ann about likes and beach"
        " | keywords: likes, beach, puppy | tags: adopted\n"
    )
    assert (second.id, second.sources, second.time) == ("D1:2", ("D1:2",), "May")


def test_keywords_are_the_rarest_and_no_fillers():
    many = [Turn(f"D1:{i}", "Ann", "The puppy and the kitten", "", "1") for i in range(3)]
    notes = filled(
        AMem(keywords=2, tags=0), *many, Turn("x", "Ann", "Great kitten, puppy, zebra, puppies", "", "1")
    )
    [unit] = notes.retrieve("zebra", 1)
    assert unit.text.endswith("| context: Ann about zebra and kitten | keywords: zebra, kitten\n")


def test_links_lead_to_notes_above_a_cosine():
    # By hand: terms ann, puppi, like, beach beside ann, may, adopt (twice), puppi (twice); idf ln(4/3), of
    # new terms ln 4; the cosine is 0.139.
    for similar, linked in ((0.138, ["D1:2", "D1:1"]), (0.14, ["D1:2"])):
        notes = filled(AMem(similar=similar, linked=3, beside=0), PUPPY, BEACH)
        assert ids(notes, "beach", 1) == linked
    assert ids(filled(AMem(similar=0.13, beside=0), PUPPY, BEACH), "beach", 1) == ["D1:2"]
    assert ids(filled(AMem(similar=0.13, links=0, linked=3, beside=0), PUPPY, BEACH), "beach", 1) == ["D1:2"]


def test_a_note_lends_to_those_beside_it_in_its_session():
    said = ("Hello Bob", "How was the museum today?", "Lovely", "Bye", "Museum", "Ok")
    turns = [Turn(f"D:{i}", "", text, "", str(i // 4)) for i, text in enumerate(said)]
    notes = filled(AMem(keywords=0, tags=0), *turns)
    # Shorter texts score more: 4, then 1; half of 4 is lent to 5 alone, since 3 is of another session.
    assert ids(notes, "museum", 5) == ["D:4", "D:1", "D:5", "D:0", "D:2"]
    apart = filled(AMem(keywords=0, tags=0, beside=0), *turns)
    assert ids(apart, "museum", 3) == ["D:4", "D:1", "D:5"]  # filled up with the latest


def test_texts_stay_what_they_were_and_asking_changes_nothing():
    turns = [
        Turn(
            f"D{i // 5}:{i}",
            "Ann" if i % 2 else "Bob",
            f"word{i % 7} thing{i % 3} place{i}",
            f"day {i // 5}",
            str(i // 5),
        )
        for i in range(30)
    ]
    batch, asked = AMem().open(), AMem().open()
    seen: dict[str, str] = {}
    for turn in turns:
        batch.add(turn)
        asked.add(turn)
        for unit in asked.retrieve("word3 place12", 10):
            assert seen.setdefault(unit.id, unit.text) == unit.text
    assert asked.retrieve("thing1 word2", 30) == batch.retrieve("thing1 word2", 30)
    assert {unit.id for unit in batch.retrieve("word3", 30)} == {turn.id for turn in turns}


def test_a_language_model_describes_a_note():
    heard = []

    def ask(prompt: str) -> str:
        heard.append(prompt)
        given = {
            "keywords": ["pet", 7, None, "dog"],
            "context": "A new\npet.",
            "tags": ["animals", "b", "c", "d"],
        }
        return f"```json\n{json.dumps(given)}\n```"

    [unit] = filled(AMem(keywords=3), PUPPY, ask=ask).retrieve("pet", 1)
    assert unit.text == (
        "[May] Ann: I adopted a puppy | context: A new pet. | keywords: pet, 7, dog | tags: animals, b, c\n"
    )
    assert heard[0].endswith("\n[May] Ann: I adopted a puppy")
    assert "at most 3 words" in heard[0]


@pytest.mark.parametrize(
    "answer", ["I cannot do that.", '{"context": "x"}', '["pet"]', '{"keywords": ["a"', ""]
)
def test_an_answer_that_describes_nothing_is_refused(answer):
    with pytest.raises(UserError, match=r"notes\.llm=null to work offline"):
        filled(AMem(), PUPPY, ask=lambda prompt: answer)


def test_knobs_have_ranges():
    with pytest.raises(UserError, match=r"notes\.keywords=-1 is too small"):
        AMem(keywords=-1)
    with pytest.raises(UserError, match=r"notes\.similar=2 is no share"):
        AMem(similar=2)


def test_nothing_was_said():
    assert AMem().open().retrieve("anything", 3) == []
