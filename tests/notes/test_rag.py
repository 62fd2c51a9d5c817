"""Plain chunks, and no memory at all."""

from __future__ import annotations

import pytest

from kvexp.errors import UserError
from kvexp.notes.rag import Rag
from kvexp.notes.retrieval import Index
from kvexp.notes.units import Turn
from kvexp.notes.whole import Whole
from kvexp.notes.words import terms

TURNS = [
    Turn(
        f"D{i // 6}:{i}",
        "Bob",
        f"word{i % 7} visited thing{i % 3} and place{i}",
        f"day {i // 6}",
        str(i // 6),
    )
    for i in range(20)
]


def test_chunks_are_ranked_by_bm25():
    notes, index = Rag(tokens=1).open(), Index(dimensions=0)
    for turn in TURNS:
        notes.add(turn)
        index.add(terms(turn.line))
    expected = [TURNS[number].id for number, _ in index.search(terms("Which thing2 was at place5?"), 6)]
    assert [unit.id for unit in notes.retrieve("Which thing2 was at place5?", 6)] == expected
    assert expected[0] == "D0:5"


def test_a_question_without_matches_gets_the_latest():
    notes = Rag(tokens=1).open()
    for turn in TURNS:
        notes.add(turn)
    assert [unit.id for unit in notes.retrieve("zebra", 2)] == ["D3:19", "D3:18"]


def test_asking_changes_nothing_and_a_name_stands_for_one_text():
    batch, asked = Rag(tokens=40).open(), Rag(tokens=40).open()
    seen: dict[str, str] = {}
    for turn in TURNS:
        batch.add(turn)
        asked.add(turn)
        for unit in asked.retrieve("word3 place12", 4):
            assert seen.setdefault(unit.id, unit.text) == unit.text
    units = batch.retrieve("word2 thing1", 40)
    assert asked.retrieve("word2 thing1", 40) == units
    assert sorted(source for unit in units for source in unit.sources) == sorted(turn.id for turn in TURNS)
    assert len(units) < len(TURNS)


def test_tokens_are_at_least_one():
    with pytest.raises(UserError, match=r"notes\.tokens=0 is too small"):
        Rag(tokens=0)


def test_no_memory_is_everything_in_order():
    notes = Whole().open()
    for turn in TURNS:
        notes.add(turn)
    units = notes.retrieve("place5", 2)
    assert [unit.id for unit in units] == [turn.id for turn in TURNS]
    assert units[7].text == "[day 1] Bob: word0 visited thing1 and place7\n"
