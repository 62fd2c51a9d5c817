"""A session in its three weightiest sentences."""

from __future__ import annotations

import pytest

from kvexp.errors import UserError
from kvexp.notes.summary import summarised
from kvexp.notes.units import Turn

TURNS = [
    Turn("D1:1", "Ann", "Hello! Alpha beta gamma delta met. Yes.", "May"),
    Turn("D1:2", "Bob", "Alpha alpha alpha alpha came. Epsilon zeta eta theta came."),
    Turn("D1:3", "", "Iota kappa mu nu came."),
]
WEIGHTS = {"alpha": 1.0, "beta": 1.0, "gamma": 2.0, "delta": 2.0, "epsilon": 9.0, "iota": 4.0}


def idf(term: str) -> float:
    return WEIGHTS.get(term, 0.0)


def test_the_three_sentences_that_weigh_most_stand_in_their_order():
    # Weights: Alpha beta... 6/5, Alpha alpha... 1/4 (a term counts once, of four at least), Epsilon... 9/5,
    # Iota... 4/5; the greetings 0.
    unit = summarised(TURNS, idf, None)
    assert unit.text == (
        "[May] Summary: Ann: Alpha beta gamma delta met. Bob: Epsilon zeta eta theta came."
        " Iota kappa mu nu came.\n"
    )
    assert unit.sources == ("D1:1", "D1:2", "D1:3")
    assert (unit.id, unit.time) == ("summary D1:1..D1:3", "May")


def test_only_the_turns_whose_sentences_stand_are_sources():
    unit = summarised(
        [TURNS[0], Turn("D1:2", "Bob", "Hello there.")], lambda term: float(term == "alpha"), None
    )
    assert unit.sources == ("D1:1",)  # the two greetings that tie with Bob's come first


def test_a_language_models_summary_stands_for_all_turns():
    heard = []

    def ask(prompt: str) -> str:
        heard.append(prompt)
        return " They\nmet. "

    unit = summarised(TURNS[1:], idf, ask)
    assert unit.text == "Summary: They met.\n"
    assert unit.sources == ("D1:2", "D1:3")
    assert "Bob: Alpha alpha" in heard[0]


def test_an_empty_summary_is_refused():
    with pytest.raises(UserError, match="asked for a summary"):
        summarised(TURNS, idf, lambda prompt: " \n")
