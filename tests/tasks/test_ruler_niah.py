"""Needles in a haystack: how many there are, where they lie, and what is asked and expected."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from kvexp.tasks.ruler_material import Words, load_templates, load_words
from kvexp.tasks.ruler_niah import NIAH, PUBLISHED_DEPTHS, recipe
from kvexp.tasks.ruler_parts import Material
from kvexp.tasks.texts import sentences

PROSE = "".join(f"On day {i} we walked. Nobody knew why. " for i in range(50))
NEEDLE = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")


def material(depths=None, words: Words | None = None) -> Material:
    words = words or load_words("/nowhere")
    return Material(load_templates(), words, tuple(PROSE.split()), depths, 4096)


def sample(name: str, n: int, depths=None, index: int = 0, seed: int = 0):
    made = recipe(NIAH[name], material(depths), random.Random(seed), index)
    return made.render(n)


def test_published_depths_are_forty_from_0_to_100():
    assert len(PUBLISHED_DEPTHS) == len(set(PUBLISHED_DEPTHS)) == 40
    assert PUBLISHED_DEPTHS[:4] == (0, 3, 5, 8) and PUBLISHED_DEPTHS[-2:] == (97, 100)


@pytest.mark.parametrize(
    ("name", "needles", "asked", "key", "value"),
    [
        ("niah_single_1", 1, 1, r"[a-z]+-[a-z]+", r"\d{7}"),
        ("niah_single_2", 1, 1, r"[a-z]+-[a-z]+", r"\d{7}"),
        ("niah_single_3", 1, 1, r"[a-z]+-[a-z]+", r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
        ("niah_multikey_1", 4, 1, r"[a-z]+-[a-z]+", r"\d{7}"),
        ("niah_multikey_2", 301, 1, r"[a-z]+-[a-z]+", r"\d{7}"),
        ("niah_multikey_3", 301, 1, r"[0-9a-f-]{36}", r"[0-9a-f-]{36}"),
        ("niah_multivalue", 4, 4, r"[a-z]+-[a-z]+", r"\d{7}"),
        ("niah_multiquery", 4, 4, r"[a-z]+-[a-z]+", r"\d{7}"),
    ],
)
def test_needles_and_answers(name, needles, asked, key, value):
    for seed in range(5):
        made = sample(name, 300, seed=seed)
        found = NEEDLE.findall(made.context)
        assert len(found) == needles and len(made.expected) == len(set(made.expected)) == asked
        assert {kind for kind, _, _ in found} == {"uuids" if "f-]" in value or "f]" in value else "numbers"}
        assert all(re.fullmatch(key, k) and re.fullmatch(value, v) for _, k, v in found)
        keys = list(dict.fromkeys(k for _, k, _ in found))
        assert len(keys) == (1 if name == "niah_multivalue" else needles)
        in_query = [k for k in keys if k in made.query]
        assert {v for _, k, v in found if k in in_query} == set(made.expected)
        assert made.query.count(in_query[0]) == 2 and len(in_query) == (4 if name == "niah_multiquery" else 1)


def test_the_order_of_answers_is_that_of_the_question():
    made = sample("niah_multiquery", 300)
    value = {key: found for _, key, found in NEEDLE.findall(made.context)}
    asked = re.search(r"numbers for (\S+), (\S+), (\S+), and (\S+) mentioned", made.query).groups()
    assert made.expected == tuple(value[key] for key in asked)


def test_one_value_is_asked_for_in_the_singular():
    key = NEEDLE.search(sample("niah_single_1", 5).context)[2]
    made = sample("niah_single_1", 5)
    assert made.context.startswith("A special magic number is hidden within the following text.")
    assert made.query == (
        f"What is the special magic number for {key} mentioned in the provided text?"
        f" The special magic number for {key} mentioned in the provided text is"
    )
    assert made.answer == f" {made.expected[0]}"
    many = sample("niah_multivalue", 50)
    assert (
        many.context.startswith("Some special magic numbers are hidden")
        and many.answer == f" {', '.join(many.expected)}"
    )
    assert many.query.startswith("What are all the special magic numbers for ")
    assert many.query.endswith("mentioned in the provided text are")


@pytest.mark.parametrize("depth", [0, 37, 50, 100])
def test_a_needle_lies_at_its_depth_in_prose(depth):
    n = 357
    before, _, after = hidden(sample("niah_single_2", n, depths=(depth,)).context)
    hay = [part.strip() for part in sentences(" ".join((PROSE.split() * 9)[:n]))]
    assert [part.strip() for part in sentences(before)] == hay[: len(hay) * depth // 100]
    assert [part.strip() for part in sentences(after)] == hay[len(hay) * depth // 100 :]


def hidden(context: str) -> tuple[str, str, str]:
    """The prose before the needle, the needle, and the prose after it."""
    body = context.split("\n", 1)[1].rstrip("\n")
    needle = NEEDLE.search(body)
    return body[: needle.start()].strip(), needle[0], body[needle.end() :].strip()


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_2"])
def test_a_needle_lies_at_its_depth_between_lines(name):
    for index, depth in enumerate((10, 50, 90, 10)):
        made = sample(name, 40, depths=(10, 50, 90), index=index)
        lines = made.context.rstrip("\n").split("\n")[1:]
        assert len(lines) == 41
        assert [i for i, line in enumerate(lines) if made.expected[0] in line] == [40 * depth // 100]


def test_depths_are_taken_in_turn_where_there_are_several_needles():
    made = sample("niah_multikey_1", 357, depths=(20, 60, 80), index=1)  # the 5th to 8th: 60, 80, 20, 60
    hay = [part.strip() for part in sentences(" ".join((PROSE.split() * 9)[:357]))]
    body = made.context.split("\n", 1)[1].rstrip("\n")
    starts = [match.start() for match in NEEDLE.finditer(body)]
    counts = [len(sentences(NEEDLE.sub("", body[:start]).strip())) for start in starts]
    assert counts == [len(hay) * depth // 100 for depth in (20, 60, 60, 80)]


def test_by_default_a_needle_lies_at_every_depth():
    places = Counter()
    for seed in range(300):
        lines = sample("niah_single_1", 10, seed=seed).context.rstrip("\n").split("\n")[1:]
        places[next(i for i, line in enumerate(lines) if NEEDLE.search(line))] += 1
    assert set(places) == set(range(10)) and min(places.values()) > 10
    shares = set()
    for seed in range(300):
        before, _, after = hidden(sample("niah_single_2", 700, seed=seed).context)
        total = len(sentences(before)) + len(sentences(after))
        shares.add(len(sentences(before)))
        assert len(sentences(before)) in {total * depth // 100 for depth in PUBLISHED_DEPTHS}
    assert len(shares) > 35


def test_what_is_asked_is_the_same_at_every_size():
    for name in NIAH:
        made = recipe(NIAH[name], material(), random.Random(7), 0)
        small, large = made.render(20), made.render(60)
        assert (small.query, small.expected) == (large.query, large.expected)
        assert made.render(20) == small and len(large.context) > len(small.context)


def test_the_haystack_repeats_where_it_ends():
    words = hidden(sample("niah_single_2", 900, depths=(100,)).context)[0].split()
    assert len(PROSE.split()) == 400 and words == (PROSE.split() * 3)[:900]
