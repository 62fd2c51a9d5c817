"""The demo: its words, and the cells of its quick form."""

from __future__ import annotations

import pytest

from kvexp.errors import UserError


def test_words(script) -> None:
    words_of = script("demo").words_of
    assert [words_of(words.split()) for words in ("", "3", "quick", "quick 3", "3 quick")] == [
        (0, False),
        (3, False),
        (0, True),
        (3, True),
        (3, True),
    ]
    for words in ("fast", "1 2", "-1", "quick 1.5"):
        with pytest.raises(UserError, match=r"is no seed: write python scripts/demo\.py \[SEED\] \[quick\]"):
            words_of(words.split())


def test_the_quick_form_has_the_same_methods_and_less_to_answer(script, tmp_path, monkeypatch) -> None:
    demo = script("demo")
    monkeypatch.setattr(demo, "ROWS", demo.ROWS[1:3])
    whole, quick = (demo.cells_of(1, quick, tmp_path) for quick in (False, True))
    assert [cell.choices["method"] for cell in quick] == [cell.choices["method"] for cell in whole]
    assert [cell.method for cell in quick] == [cell.method for cell in whole]
    assert [cell.budget for cell in quick] == [cell.budget for cell in whole]
    assert {cell.limit for cell in whole} == {None} and {cell.limit for cell in quick} == {40}
    assert {cell.calibration.n for cell in quick} == {60} and {cell.calibration.n for cell in whole} == {300}
    assert {cell.seed for cell in (*whole, *quick)} == {1}
    assert f"{quick[0].limit} of {quick[0].task.n_test} queries" in " ".join(demo.QUICK_SAID.split())
