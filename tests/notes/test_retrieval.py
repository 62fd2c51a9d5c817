"""The index: BM25 and cosine by hand, and the same ranking as scoring every text."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Sequence
from math import log, sqrt

import pytest

from kvexp.notes.retrieval import Index, best, fill


def filled(texts: Sequence[Sequence[str]], **options: float) -> Index:
    index = Index(**options)
    for text in texts:
        index.add(text)
    return index


def corpus(n: int, seed: int) -> list[list[str]]:
    rng = random.Random(seed)
    return [[f"w{int(rng.paretovariate(0.7)) % 200}" for _ in range(rng.randint(1, 30))] for _ in range(n)]


def slow(
    texts: Sequence[Sequence[str]], query: Sequence[str], k1: float = 1.2, b: float = 0.75
) -> list[float]:
    """BM25 of each text, straight from its definition."""
    mean = sum(map(len, texts)) / len(texts)
    scores = [0.0] * len(texts)
    for term in set(query):
        n = sum(term in text for text in texts)
        idf = log(1 + (len(texts) - n + 0.5) / (n + 0.5))
        for i, text in enumerate(texts):
            f = text.count(term)
            scores[i] += idf * f * (k1 + 1) / (f + k1 * (1 - b + b * len(text) / mean))
    return scores


def test_bm25_by_hand():
    index = filled([["a", "b"], ["a"], ["c", "c", "c"]])
    found = dict(index.search(["a", "a", "unknown"], 3))
    # "a" is in 2 of 3 texts, whose mean length is 2.
    assert found == pytest.approx({1: log(1.6) * 2.2 / 1.75, 0: log(1.6) * 2.2 / 2.2})
    assert list(found) == [1, 0]
    assert index.search(["unknown"], 3) == []


@pytest.mark.parametrize("dimensions", [0, 16, 2048])
def test_the_ranking_is_that_of_scoring_every_text(dimensions):
    texts = corpus(300, seed=1)
    index = filled(texts, dimensions=dimensions)
    for query in corpus(8, seed=2):
        expected = slow(texts, query)
        found = index.search(query, 10)
        ranked = sorted(range(300), key=lambda i: (-round(expected[i], 9), i))
        assert [number for number, _ in found] == [i for i in ranked if expected[i] > 0][:10]
        assert [score for _, score in found] == pytest.approx([expected[i] for i, _ in found])


def test_of_many_texts_faiss_finds_the_best():
    texts = corpus(1200, seed=3)
    index, exact = filled(texts), filled(texts, dimensions=0)
    shared = 0
    for query in corpus(10, seed=4):
        found, expected = index.search(query[:8], 10), dict(exact.search(query[:8], 1200))
        assert all(score == pytest.approx(expected[number]) for number, score in found)
        shared += len({number for number, _ in found} & set(list(expected)[:10]))
    assert shared >= 95  # of 100


def test_equal_scores_keep_the_order_in_which_texts_came():
    index = filled([["x"], ["a"], ["a"], ["a"]])
    assert [number for number, _ in index.search(["a"], 2)] == [1, 2]


def test_cosine_by_hand():
    index = filled([["x", "y"], ["x", "z", "z"]])
    x, rare = log(1 + 0.5 / 2.5), log(1 + 1.5 / 1.5)
    longer = (1 + log(2)) * rare
    expected = x * x / (sqrt(x * x + rare * rare) * sqrt(x * x + longer * longer))
    assert index.cosine(["x", "y"], 1) == pytest.approx(expected)
    assert index.cosine(["x", "y"], 0) == pytest.approx(1.0)
    assert index.cosine(["y"], 1) == index.cosine([], 1) == 0.0


def test_a_copy_grows_apart():
    index = filled([["a"], ["b"]])
    twin = copy.deepcopy(index)
    twin.add(["a", "a"])
    assert len(index.search(["a"], 5)) == 1
    assert Counter(number for number, _ in twin.search(["a"], 5)) == {0: 1, 2: 1}


def test_best_and_fill():
    assert best({3: 1.0, 1: 2.0, 2: 1.0}, 2) == [1, 2]
    assert fill([4, 0], 4, 6) == [4, 0, 5, 3]
    assert fill([1, 0], 5, 2) == [1, 0]
    assert fill([1, 0], 1, 2) == [1, 0]
