"""RULER's eight subtasks of needles in a haystack: facts hidden in noise, prose or other facts."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Literal

from kvexp.tasks.ruler_material import Form, Words
from kvexp.tasks.ruler_parts import Material, Recipe, Sample
from kvexp.tasks.texts import sentences

Kind = Literal["words", "numbers", "uuids"]
PUBLISHED_DEPTHS = tuple(round(100 * i / 39) for i in range(40))
"""Percentages of the sentences before a needle in prose, of which each sample draws as many as it hides."""


@dataclass(frozen=True)
class Niah:
    """A subtask: what hides the needles, of what kind keys and values are, and how many there are of each."""

    haystack: Literal["noise", "prose", "needles"]
    keys: Kind
    values: Kind
    n_keys: int = 1
    n_values: int = 1
    n_queries: int = 1


NIAH = {
    "niah_single_1": Niah("noise", "words", "numbers"),
    "niah_single_2": Niah("prose", "words", "numbers"),
    "niah_single_3": Niah("prose", "words", "uuids"),
    "niah_multikey_1": Niah("prose", "words", "numbers", n_keys=4),
    "niah_multikey_2": Niah("needles", "words", "numbers"),
    "niah_multikey_3": Niah("needles", "uuids", "uuids"),
    "niah_multivalue": Niah("prose", "words", "numbers", n_values=4),
    "niah_multiquery": Niah("prose", "words", "numbers", n_keys=4, n_queries=4),
}


def recipe(niah: Niah, material: Material, rng: random.Random, index: int) -> Recipe:
    """Return sample number `index` of a subtask; a unit is a line of noise, a needle, or a word of prose."""
    draw = _Draw(rng, material.words)
    keys = [draw.fresh(niah.keys) for _ in range(niah.n_keys)]
    values = {key: [draw.fresh(niah.values) for _ in range(niah.n_values)] for key in keys}
    needles = [_needle(niah, material, key, value) for key in keys for value in values[key]]
    rng.shuffle(needles)
    asked = rng.sample(keys, niah.n_queries)
    depths = _depths(material.depths, index, len(needles))
    places, others = rng.getrandbits(64), rng.getrandbits(64)
    answers = tuple(value for key in asked for value in values[key])

    def render(n: int) -> Sample:
        own = random.Random(places)
        if niah.haystack == "prose":
            hay = [part.strip() for part in sentences(" ".join(islice(cycle(material.haystack), n)))]
            at = depths or sorted(own.sample(PUBLISHED_DEPTHS, len(needles)))
            context = " ".join(_hide(hay, needles, [len(hay) * depth // 100 for depth in at]))
        else:
            spots = [n * depth // 100 for depth in depths] or sorted(own.sample(range(n), len(needles)))
            drawn = _Draw(random.Random(others), material.words, set(draw.taken))
            context = "\n".join(_hide(_lines(niah, material, drawn, n), needles, spots))
        return _sample(niah, material.templates.niah, context, asked, answers)

    return Recipe(render, low=len(needles), high=material.length)


class _Draw:
    """Draws keys and values of which no two are the same."""

    def __init__(self, rng: random.Random, words: Words, taken: set[str] | None = None) -> None:
        self.rng, self.words, self.taken = rng, words, set() if taken is None else taken

    def fresh(self, kind: Kind) -> str:
        while (drawn := self._any(kind)) in self.taken:
            pass
        self.taken.add(drawn)
        return drawn

    def _any(self, kind: Kind) -> str:
        if kind == "numbers":
            return str(self.rng.randrange(10**6, 10**7))
        if kind == "uuids":
            return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))
        return f"{self.rng.choice(self.words.adjectives)}-{self.rng.choice(self.words.nouns)}"


def _needle(niah: Niah, material: Material, key: str, value: str) -> str:
    return material.templates.needle.format(type_needle_v=niah.values, key=key, value=value)


def _depths(given: tuple[int, ...] | None, index: int, count: int) -> list[int]:
    """The depths of a sample's needles in rising order: those given are taken in turn."""
    return sorted(given[(index * count + i) % len(given)] for i in range(count)) if given else []


def _lines(niah: Niah, material: Material, draw: _Draw, n: int) -> list[str]:
    """The first `n` lines of the haystack; other needles have keys and values of their own."""
    if niah.haystack == "noise":
        return [material.templates.noise] * n
    return [_needle(niah, material, draw.fresh(niah.keys), draw.fresh(niah.values)) for _ in range(n)]


def _hide(hay: Sequence[str], needles: Sequence[str], spots: Sequence[int]) -> list[str]:
    """Put each needle before the piece of hay with its number; `spots` rise."""
    parts = list(hay)
    for spot, needle in zip(reversed(spots), reversed(needles), strict=True):
        parts.insert(spot, needle)
    return parts


def _sample(niah: Niah, form: Form, context: str, asked: Sequence[str], answers: tuple[str, ...]) -> Sample:
    what: str = niah.values
    query = ", ".join(asked[:-1]) + f", and {asked[-1]}" if len(asked) > 1 else asked[0]
    if len(answers) == 1:
        form, what = _singular(form), what.removesuffix("s")
    body, question = form.fill(context, type_needle_v=what, query=query)
    return Sample(body, question, answers, f" {', '.join(answers)}")


def _singular(form: Form) -> Form:
    """The form that asks for one value, made by replacing words as the published code does."""

    def one(text: str) -> str:
        return text.replace("Some", "A").replace("are all", "is").replace("are", "is")

    return Form(one(form.body), one(form.question), one(form.prefix))
