"""What is read in the answers of language models."""

from __future__ import annotations

from kvexp.notes.answers import rows, texts, unreadable, values


def test_values_stand_in_any_text():
    assert list(values('Sure: {"a": [1]} and then [2, "}"] ```')) == [{"a": [1]}, [2, "}"]]
    assert list(values("no { json ] here")) == []


def test_the_whole_parts_of_a_value_cut_short_are_read():
    assert list(values('{"a": ["x"], "b": ["y"')) == [["x"]]


def test_rows_alone_or_in_a_list():
    assert rows('[["a", "b"], ["c"], [1, "d  e"]]', 2) == [("a", "b"), ("1", "d e")]
    assert rows('["a", "[b]"]\n["c", "d"]', 2) == [("a", "[b]"), ("c", "d")]
    assert rows('{"a": 1}', 2) == rows('[["a", null]]', 2) == []


def test_texts_are_lines():
    assert texts([" a\nb", 2, None, ["c"]]) == ["a b", "2"]
    assert texts("abc") == texts(None) == []


def test_the_sentence_shows_the_start_of_an_answer():
    assert 'answered "' + "x" * 80 + '...":' in str(unreadable("rows", "x" * 200))
