"""Counting and tracking: the counts are counted, the chains are followed by brute force."""

from __future__ import annotations

import math
import random
import re
from collections import Counter

import pytest

from kvexp.tasks.ruler_material import load_templates, load_words
from kvexp.tasks.ruler_parts import Material
from kvexp.tasks.ruler_words import common_words, frequent_words, variable_tracking, zeta_count

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def material(length: int) -> Material:
    return Material(load_templates(), load_words("/nowhere"), (), None, length)


def listed(text: str) -> list[str]:
    """The words of a numbered list, whose numbers must count up."""
    numbers, words = zip(*re.findall(r"(\d+)\. (\S+)", text), strict=True)
    assert list(map(int, numbers)) == list(range(1, len(numbers) + 1))
    return list(words)


@pytest.mark.parametrize(
    ("length", "common", "uncommon", "example"), [(4096, 30, 3, (10, 3, 40)), (4095, 6, 1, (3, 1, 20))]
)
def test_common_words_by_counting(length, common, uncommon, example):
    for seed in range(5):
        made = common_words(material(length), random.Random(seed)).render(50)
        assert made.query.startswith("Question: What are the 10 most common words in the above list? Answer:")
        shown, question, own = made.context.split("Below is a numbered list of words.")[1:][0], *cut(made)
        counts = Counter(listed(own))
        assert counts == {word: common if word in made.expected else uncommon for word in counts}
        assert len(counts) == 50 and len(made.expected) == 10 and set(made.expected) <= set(counts)
        body, solved = shown.split(question)
        counts = Counter(listed(body.split("\n")[1]))
        answer = listed(solved)
        assert Counter(counts.values()) == {example[0]: 10, example[1]: example[2] - 10}
        assert sorted(answer) == sorted(word for word, count in counts.items() if count == example[0])


def cut(made) -> tuple[str, str]:
    """The question with the start of its answer, and the list that it is about."""
    return made.query, made.context.rsplit("\n", 2)[-2]


def test_common_words_end_where_the_words_do():
    recipe = common_words(material(4096), random.Random(0))
    assert (recipe.low, recipe.high) == (11, 9000)
    assert len(set(listed(cut(recipe.render(9000))[1]))) == 9000


def test_a_larger_list_asks_for_the_same_words():
    recipe = common_words(material(4096), random.Random(3))
    small, large = recipe.render(20), recipe.render(90)
    assert small.expected == large.expected and recipe.render(20) == small
    assert set(listed(cut(small)[1])) < set(listed(cut(large)[1]))


def test_zeta_counts():
    zeta = sum(1 / k**2 for k in range(1, 200_001)) + 1 / 200_000.5
    for n in (79, 500, 4096):
        assert [zeta_count(n, rank) for rank in range(1, 40)] == [
            math.floor(n / (rank**2 * zeta)) for rank in range(1, 40)
        ]
    assert [zeta_count(79, rank) for rank in range(1, 6)] == [48, 12, 5, 3, 1]


@pytest.mark.parametrize("n", [79, 80, 333, 2000])
def test_frequent_words_by_counting(n):
    recipe = frequent_words(material(4096), random.Random(n))
    made = recipe.render(n)
    assert recipe.low == 79 and made.context.startswith("Read the following coded text and track")
    coded = made.context.rstrip("\n").split("coded words. ", 1)[1].split(" ")
    counts = Counter(coded)
    dots = counts.pop("...")
    ranked = counts.most_common()
    assert tuple(word for word, _ in ranked[:3]) == made.expected
    assert [dots, *(count for _, count in ranked)] == [
        zeta_count(n, rank) for rank in range(1, len(counts) + 2)
    ]
    assert ranked[2][1] > ranked[3][1] and all(re.fullmatch("[a-z]{6}", word) for word in counts)
    assert len(counts) <= 4096 // 50 and coded != sorted(coded)


def test_every_sample_has_a_vocabulary_of_its_own():
    samples = [frequent_words(material(2048), random.Random(seed)).render(200) for seed in range(3)]
    assert len({word for made in samples for word in made.expected}) == 9


def chains(text: str) -> list[tuple[str, str]]:
    """The assignments in a text, in order."""
    return re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text)


def holders(assignments: list[tuple[str, str]], value: str) -> list[str]:
    """The variables that hold a value when the assignments are carried out in order."""
    held: dict[str, str] = {}
    for name, source in assignments:
        held[name] = held.get(source, source)
    return [name for name, own in held.items() if own == value]


@pytest.mark.parametrize("n", [5, 30, 200])
def test_variables_by_brute_force(n):
    for seed in range(20):
        made = variable_tracking(material(4096), random.Random(seed)).render(n)
        value = re.match(r"Question: Find all variables that are assigned the value (\d{5}) in", made.query)[
            1
        ]
        assert made.query.endswith(f"5 variables are assgined the value {value}, they are:")
        example, text = made.context.split("\n\nMemorize and track")
        assert holders(chains(text), value) == list(made.expected) and len(chains(text)) == 5
        assert all(re.fullmatch("[A-Z]{5}", name) for name in made.expected)
        assert text.count(NOISE) == n
        shown = re.search(r"assgined the value (\d{5}), they are: (.*)", example)
        assert holders(chains(example), shown[1]) == shown[2].split() and len(shown[2]) == 5 * 4 - 1
        assert example.count(NOISE) == 15


def test_assignments_are_parted_by_noise():
    made = variable_tracking(material(1024), random.Random(1)).render(5)
    lines = made.context.split("\n\nMemorize")[1].split("VAR ", 1)[1]
    assert re.findall(r"again\.\n VAR|\d{5} The|[A-Z] The", lines).count("again.\n VAR") == 4
    assert variable_tracking(material(1024), random.Random(1)).low == 5
