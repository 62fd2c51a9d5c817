"""Triples of simple sentences, and those that a language model writes."""

from __future__ import annotations

import pytest

from kvexp.errors import UserError
from kvexp.notes.triples import Triple, asked, entity, made
from kvexp.notes.units import Turn


def of(text: str) -> list[tuple[str, str, str]]:
    return [(one.subject, one.relation, one.object) for one in made([Turn("1", "Ann", text, "May")])]


def test_a_verb_joins_its_subject_and_the_next_phrase():
    assert of("Bob visited the museum.") == [("bob", "visited", "museum")]
    assert of("I painted a red barn.") == [("Ann", "painted", "red barn")]
    assert of("She went to Paris, and Bob bought her a ticket.") == [
        ("Ann", "went", "paris"),
        ("bob", "bought", "ticket"),
    ]


def test_a_phrase_that_begins_with_a_verb_is_said_of_the_speaker():
    assert of("enjoyed warm summer") == [("Ann", "enjoyed", "warm summer")]


def test_other_phrases_are_mentioned():
    assert of("My sister, the new house") == [("Ann", "mentions", "sister"), ("Ann", "mentions", "new house")]
    assert of("It ended.") == [("Ann", "mentions", "ended")]
    assert of("So it is.") == []


def test_a_triple_has_the_terms_of_its_time_and_the_stems_of_its_ends():
    one = Triple("Bob", "visited", "the museums", "2 May")
    assert one.terms == ["bob", "visit", "museum", "2", "may"]
    assert one.ends == (("bob",), ("museum",))
    assert entity("red barns") == entity("the barn, red")


def test_triples_of_a_language_model():
    heard = []

    def ask(prompt: str) -> str:
        heard.append(prompt)
        return 'Here: [["Bob", "visited", "the museum"], ["too", "short"], ["Ann", "owns", 2]]'

    assert asked(ask, "Ann: Bob went there", "May") == [
        Triple("Bob", "visited", "the museum", "May"),
        Triple("Ann", "owns", "2", "May"),
    ]
    assert heard[0].endswith("Ann: Bob went there")
    assert asked(lambda prompt: "[]", "x", "") == []


def test_whole_triples_of_an_answer_cut_short_count():
    assert asked(lambda prompt: '[["a", "is", "b"], ["c", "is"', "x", "") == [Triple("a", "is", "b")]


def test_an_answer_without_triples_is_refused():
    with pytest.raises(UserError, match=r'asked for triples .* and answered "Sure! Bob visited it."'):
        asked(lambda prompt: "Sure! Bob\nvisited it.", "x", "")
