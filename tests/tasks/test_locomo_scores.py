"""Both F1 scores of locomo, by hand."""

from __future__ import annotations

import pytest

from kvexp.prompt import Context
from kvexp.tasks.locomo_scores import NOT_MENTIONED, gold_answer, score
from kvexp.tasks.questions import Question

OFFER = f"Question: Why? Choose the right answer:\n(a) {NOT_MENTIONED}\n(b) a dog\nAnswer:"
SWAPPED = f"Question: Why? Choose the right answer:\n(a) a dog\n(b) {NOT_MENTIONED}\nAnswer:<end>"


@pytest.mark.parametrize(
    ("category", "gold", "answer", "f1", "f1_set"),
    [
        (1, "pottery, camping, painting", "painting, hiking", 1 / 3, 2 / 5),
        (1, "pottery, camping, painting", "Camping and painting", 4 / 9, 4 / 6),
        (1, "pottery, camping, painting", "painting, pottery, camping", 1, 1),
        (1, "pottery", "pottery, camping", 1, 2 / 3),
        (1, "pottery, camping", "", 0, 0),
        (1, "pottery, camping", ", ,", 0, 0),
        (2, "7 May 2023", "7 May, 2023.", 1, 1),
        (2, "7 May 2023", "May 2023", 4 / 5, 4 / 5),
        (2, "7 May 2023", "on the 7th of May", 2 / 7, 2 / 8),
        (2, "2022", " 2022\n", 1, 1),
        (3, "Yes; since he likes dogs", "yes", 1, 1),
        (3, "Yes; since he likes dogs", "Surely yes, he runs", 2 / 5, 2 / 5),
        (4, "The cats and a dog", "cat, dog", 1, 2 / 7),
        (4, "pottery, camping", "camping", 2 / 3, 2 / 3),  # whole answers, commas or not
        (4, "no no", "no", 2 / 3, 1),
        (4, "don't", "dont", 1, 0),
        (4, "self-care", "self care", 0, 0),
        (4, "running shoes", "He runs in shoes", 4 / 6, 2 / 6),
        (4, "the", "a", 0, 0),
    ],
)
def test_answers_scored_by_hand(category, gold, answer, f1, f1_set):
    names = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop"}
    question = asked(gold_answer(category, gold), f"{names[category]} | categories 1-4")
    assert score(question, answer) == {"f1": pytest.approx(f1), "f1_set": pytest.approx(f1_set)}


@pytest.mark.parametrize(
    ("answer", "f1", "f1_set"),
    [
        ("(a)", 1, 1),
        ("a", 1, 1),
        (" A. ", 1, 1),
        ("(b)", 0, 0),
        ("b.", 0, 0),
        ("Not mentioned.", 1, 4 / 7),
        ("There is no information available on it", 1, 0),
        ("It is not mentioned in the conversation", 1, 10 / 12),
        (f"(a) {NOT_MENTIONED}", 1, 10 / 11),
        ("(b) a dog", 0, 0),
        ("a dog", 0, 0),
        ("", 0, 0),
    ],
)
def test_adversarial_answers_scored_by_hand(answer, f1, f1_set):
    wanted = {"f1": f1, "f1_set": pytest.approx(f1_set)}
    assert score(asked(gold_answer(5, "a dog"), "adversarial", OFFER), answer) == wanted
    swapped = {"(a)": "(b)", "a": "b", " A. ": " B. ", "(b)": "(a)", "b.": "a."}.get(answer, answer)
    assert score(asked(gold_answer(5, "a dog"), "adversarial", SWAPPED), swapped) == wanted


def asked(gold: str, group: str, query: str = "Question: Why?\nAnswer:") -> Question:
    return Question("0", 0, Context((), ()), query, (0,), (gold,), 32, group)
