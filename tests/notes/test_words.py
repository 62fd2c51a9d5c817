"""Words, stems, phrases and steps of small texts."""

from __future__ import annotations

from kvexp.notes.words import FILLERS, STOP, clauses, phrases, stem, terms, words


def test_words_are_lower_case_without_stop_words_and_endings_after_an_apostrophe():
    assert words("Ann's dog can't swim; we've 2 boats, O’Neill's") == [
        "ann",
        "dog",
        "swim",
        "2",
        "boats",
        "o’neill",
    ]


def test_stems_are_porters():
    assert [stem(word) for word in ("studies", "painted", "running", "ponies")] == [
        "studi",
        "paint",
        "run",
        "poni",
    ]


def test_terms_name_each_step_of_a_range():
    assert terms("What changed in steps 7 to 9?")[-3:] == ["step:7", "step:8", "step:9"]
    assert terms("after step 12") == ["step", "12", "step:12"]
    assert terms("Step 5 - step 6")[-2:] == ["step:5", "step:6"]


def test_a_long_range_counts_twenty_steps_and_a_backward_one_its_first():
    assert terms("steps 1 to 400")[-1] == "step:20"
    assert [term for term in terms("steps 9 to 3") if ":" in term] == ["step:9"]


def test_phrases_end_at_stop_words_and_marks_and_hold_four_words():
    assert phrases("red barn, old house by the sea") == [["red", "barn"], ["old", "house"], ["sea"]]
    assert phrases("one two three four five six") == [["one", "two", "three", "four"], ["five", "six"]]


def test_clauses_keep_together_what_no_mark_parts():
    assert clauses("Bob visited the museum. The red barn") == [
        [["bob", "visited"], ["museum"]],
        [["red", "barn"]],
    ]
    assert clauses("of the and. !") == []


def test_the_lists_of_words_are_apart_and_lower_case():
    assert not STOP & FILLERS
    assert all(word == word.lower() for word in STOP | FILLERS)
