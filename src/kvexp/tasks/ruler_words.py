"""RULER's subtasks of counting and tracking: common words, frequent words, and variables passed on."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass

from kvexp.tasks.ruler_parts import Material, Recipe, Sample

_COMMON = 10
_HOPS = 4


def common_words(material: Material, rng: random.Random) -> Recipe:
    """`cwe`: ten words occur 30 times in a numbered list and the others 3 times; the ten are asked for.

    Below 4096 tokens it is 6 times and once. A unit is a distinct word, so the length ends where the words
    do. A solved example of 40 (below 4096: 20) words comes first.
    """
    long = material.length >= 4096
    words = material.words.all
    shown = rng.sample(words, len(words))
    example = rng.sample(words, 40 if long else 20)
    stream, seed = rng.getrandbits(64), rng.getrandbits(64)
    form = material.templates.cwe
    body, question = form.fill(_numbered(example, 10 if long else 3, 3 if long else 1, seed))
    start = f"{body}{question} {_numbers(example[:_COMMON])}\n"
    expected = tuple(shown[:_COMMON])

    def render(n: int) -> Sample:
        counts = (30, 3) if long else (6, 1)
        body, question = form.fill(_numbered(shown[:n], *counts, stream))
        return Sample(start + body, question, expected, f" {_numbers(expected)}")

    return Recipe(render, low=_COMMON + 1, high=len(words))


def frequent_words(material: Material, rng: random.Random) -> Recipe:
    """`fwe`: coded words in a Zeta distribution of exponent 2; the three most frequent ones are asked for.

    The words are six random letters each, one for every 50 tokens of the length. The word of rank k occurs
    floor(n k^-2 / zeta(2)) times in a text of size n; that of rank 1 is shown as dots and does not count.
    """
    vocabulary = ["..."]
    while len(vocabulary) < max(material.length // 50, 5):
        word = "".join(rng.choices(string.ascii_lowercase, k=6))
        if word not in vocabulary:
            vocabulary.append(word)
    stream, expected = rng.getrandbits(64), tuple(vocabulary[1:4])

    def render(n: int) -> Sample:
        coded = [word for rank, word in enumerate(vocabulary, 1) for _ in range(zeta_count(n, rank))]
        random.Random(stream).shuffle(coded)
        body, question = material.templates.fwe.fill(" ".join(coded))
        return Sample(body, question, expected, f" {' '.join(expected)}")

    # From 79 on the counts of ranks 2, 3, 4 and 5 differ: 12, 5, 3, 1.
    return Recipe(render, low=79, high=2 * material.length)


def zeta_count(n: int, rank: int) -> int:
    """Return how often the word of a rank occurs in a text of size `n`: floor(n / (rank^2 zeta(2)))."""
    return math.floor(6 * n / (math.pi * rank) ** 2)


def variable_tracking(material: Material, rng: random.Random) -> Recipe:
    """`vt`: a value is given to a variable and passed on four times; all five variables are asked for.

    The assignments lie in order between lines of noise, a unit each. A solved example with variables of three
    letters comes first, in at most 15 lines of noise (about 500 tokens).
    """
    lines = max(_HOPS + 1, min(15, material.length // 256))
    example, chain = _Chain.draw(rng, letters=3), _Chain.draw(rng, letters=5)
    stream, seed = rng.getrandbits(64), rng.getrandbits(64)
    body, question = example.prompt(material, lines, seed)
    start = f"{body}{question} {' '.join(example.names)}\n\n"

    def render(n: int) -> Sample:
        body, question = chain.prompt(material, n, stream)
        return Sample(start + body, question, chain.names, f" {' '.join(chain.names)}")

    return Recipe(render, low=_HOPS + 1, high=material.length)


def _numbered(words: Sequence[str], common: int, uncommon: int, stream: int) -> str:
    listed = list(words[:_COMMON]) * common + list(words[_COMMON:]) * uncommon
    random.Random(stream).shuffle(listed)
    return _numbers(listed)


def _numbers(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


@dataclass(frozen=True)
class _Chain:
    """A value, and the variables that it passes through."""

    value: str
    names: tuple[str, ...]

    @classmethod
    def draw(cls, rng: random.Random, letters: int) -> _Chain:
        names: dict[str, None] = {}
        while len(names) < _HOPS + 1:
            names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        return cls(str(rng.randrange(10000, 100000)), tuple(names))

    def prompt(self, material: Material, n: int, stream: int) -> tuple[str, str]:
        """The prompt of `n` lines of noise, each assignment before another one of them."""
        lines = [f"{material.templates.noise}\n"] * n
        spots = sorted(random.Random(stream).sample(range(n), len(self.names)))
        sources = (self.value, *(f"VAR {name}" for name in self.names))
        for i in reversed(range(len(spots))):
            lines.insert(spots[i], f"VAR {self.names[i]} = {sources[i]}")
        text = " ".join(lines).rstrip("\n")
        return material.templates.vt.fill(text, query=self.value, num_v=len(self.names))
