"""Chunks: how long a text is, where chunks end, and that asking in between changes nothing."""

from __future__ import annotations

from kvexp.notes.chunks import Chunks, as_chunk, length, span
from kvexp.notes.units import Turn


def turn(number: int, text: str = "one two three", session: str = "1", time: str = "May") -> Turn:
    return Turn(f"D1:{number}", "Ann", text, time, session)


def packed(turns: list[Turn], tokens: int) -> list[list[str]]:
    chunks = Chunks(tokens)
    found = [chunks.add(one) for one in turns]
    return [[one.id for one in chunk] for chunk in [*found, chunks.close()] if chunk]


def test_length_counts_marks_letters_by_eight_and_digits_by_three():
    assert length("Hello, world_1234!") == 1 + 1 + 1 + 1 + 2 + 1
    assert length("international") == 2
    assert length("") == 0


def test_chunks_hold_whole_turns_of_one_session():
    # Each turn has five: Ann, the colon and three words.
    turns = [turn(1), turn(2), turn(3), turn(4, session="2"), turn(5, session="2")]
    assert packed(turns, 10) == [["D1:1", "D1:2"], ["D1:3"], ["D1:4", "D1:5"]]
    assert packed(turns, 9) == [[one.id] for one in turns]
    assert packed(turns, 1) == [[one.id] for one in turns]


def test_a_chunk_shows_the_time_where_it_changes_and_names_its_ends():
    unit = as_chunk([turn(1), turn(2, " two  \n\n words "), turn(3, time="June")])
    assert unit.text == "[May]\nAnn: one two three\nAnn: two\n words\n[June]\nAnn: one two three\n"
    assert unit.id == "D1:1..D1:3"
    assert unit.sources == ("D1:1", "D1:2", "D1:3")
    assert unit.time == "May"
    assert span([turn(7)]) == "D1:7"
