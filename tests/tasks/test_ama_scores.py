"""F1, final answers and verdicts of ama_bench, by hand."""

from __future__ import annotations

import pytest

from kvexp.tasks.ama_scores import f1, final_answer, judged


@pytest.mark.parametrize(
    ("answer", "reference", "wanted"),
    [
        ("moved to 3,4", "The agent moved to (3, 4).", 8 / 9),
        ("Step 12", "step 12!", 1),
        ("12.5", "12 5", 1),  # marks are spaces
        ("snake case", "snake_case", 0),  # but an underscore is a letter
        ("café — open", "cafe open", 2 / 4),
        ("go go go", "go", 2 / 4),
        ("then", "the n", 0),
        ("An apple a day", "the apple day", 1),
        ("", "x", 0),
        ("x", "", 0),
        ("the", "a", 1),
        ("", "", 1),
    ],
)
def test_f1_by_hand(answer, reference, wanted):
    assert f1(answer, reference) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" Step 7.\n", "Step 7."),
        ("Let me see.\nAnswer: Step 7", "Step 7"),
        ("Answer[1]: Step 6\nAnswer[2]: Step 7", "Step 7"),
        ("**Answer:** Step 7\nin the north", "Step 7\nin the north"),
        ("##Answer: Step 7", "Step 7"),
        ("The answer: no mark opens this line", "The answer: no mark opens this line"),
        ("<think>Answer: 6</think>\nAnswer: 7", "7"),
        ("Answer: 6 perhaps</think>7", "7"),  # opened by the template
        ("<think>6, or", ""),
        ("7<think>or 6", "7"),
        ("", ""),
    ],
)
def test_what_counts_as_the_answer(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("yes", 1),
        ("Yes.", 1),
        ("No", 0),
        ("yes, but in truth no", 0),
        ("No ... wait. YES", 1),
        ("<think>no</think>yes", 1),
        ("<think>yes", 0),
        ("Yesterday", 0),
        ("perhaps", 0),
        ("", 0),
    ],
)
def test_verdicts(said, right):
    prompts = []
    assert judged(lambda prompt: prompts.append(prompt) or said, "Where?", "north {x}", "south") == right
    assert "Question: Where?\nReference answer: north {x}\nAnswer to judge: south\n" in prompts[0]
