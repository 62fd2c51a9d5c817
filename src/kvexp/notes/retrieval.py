"""A search index over short texts that come one by one: FAISS finds candidates, BM25 ranks them.

BM25 is that of Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009): with
n of N texts that hold a term, a text of length l and mean length m that holds it f times scores

    ln(1 + (N - n + 1/2) / (n + 1/2)) * f (k1 + 1) / (f + k1 (1 - b + b l / m)).

FAISS holds, for each text, the second factor of its terms, hashed with a sign into `dimensions` numbers; a
query is hashed with the first factor, so that their inner product is the score up to collisions. The best
candidates are then scored without hashing. A text is never hashed anew: its m is that of the texts up to it.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

_CANDIDATES = 1024  # texts that are scored exactly; where there are no more, the ranking is exact


class Index:
    """Texts as lists of terms, numbered from 0 in the order in which they come.

    With `dimensions=0` every text that shares a term with the query is a candidate, and there is no FAISS:
    for very many texts of a few terms each, where hashing would blur what little they say.
    """

    def __init__(self, k1: float = 1.2, b: float = 0.75, dimensions: int = 2048) -> None:
        self.k1, self.b, self.dimensions = k1, b, dimensions
        self._counts: list[Counter[str]] = []
        self._lengths: list[int] = []
        self._holding: Counter[str] = Counter()
        self._total = 0
        self._with: defaultdict[str, list[int]] = defaultdict(list)
        self._faiss: Any = None
        if dimensions:
            import faiss

            self._faiss = faiss.IndexFlatIP(dimensions)

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, terms: Iterable[str]) -> int:
        """Add a text; return its number."""
        counts = Counter(terms)
        self._counts.append(counts)
        self._holding.update(counts.keys())
        self._lengths.append(counts.total())
        self._total += counts.total()
        number = len(self._counts) - 1
        if self._faiss is None:
            for term in counts:
                self._with[term].append(number)
        else:
            room = self._room(counts.total())
            gains = {term: f * (self.k1 + 1) / (f + room) for term, f in counts.items()}
            self._faiss.add(self._hashed(gains))
        return number

    def idf(self, term: str) -> float:
        """Return the weight of a term: the first factor above."""
        n = self._holding[term]
        return math.log1p((len(self._counts) - n + 0.5) / (n + 0.5))

    def search(self, terms: Iterable[str], n: int) -> list[tuple[int, float]]:
        """Return the numbers and scores of the `n` best texts that share a term with the query, best first.

        A term counts once, however often the query has it. Equal scores keep the order in which texts came.
        """
        weights = {term: self.idf(term) for term in sorted(set(terms) & self._holding.keys())}
        if not weights:
            return []
        scores = {number: self._score(weights, number) for number in self._candidates(weights, n)}
        return [(number, scores[number]) for number in best(scores, n) if scores[number] > 0]

    def _candidates(self, weights: Mapping[str, float], n: int) -> Iterable[int]:
        if self._faiss is None:
            return {number for term in weights for number in self._with[term]}
        near = min(len(self), max(_CANDIDATES, 2 * n))
        return map(int, self._faiss.search(self._hashed(weights), near)[1][0])

    def _score(self, weights: Mapping[str, float], number: int) -> float:
        counts = self._counts[number]
        there = [(counts[term], weight) for term, weight in weights.items() if term in counts]
        if not there:
            return 0.0
        room = self._room(self._lengths[number])
        return sum(weight * f * (self.k1 + 1) / (f + room) for f, weight in there)

    def cosine(self, a: Mapping[str, int] | Sequence[str], number: int) -> float:
        """Return the cosine of two texts whose terms weigh (1 + ln f) idf."""
        ours, theirs = self._weights(Counter(a)), self._weights(self._counts[number])
        shared = math.fsum(ours[term] * theirs[term] for term in ours.keys() & theirs.keys())
        norms = [math.sqrt(math.fsum(w * w for w in one.values())) for one in (ours, theirs)]
        return shared / (norms[0] * norms[1]) if all(norms) else 0.0

    def _weights(self, counts: Counter[str]) -> dict[str, float]:
        return {term: (1 + math.log(f)) * self.idf(term) for term, f in counts.items()}

    def _room(self, length: int) -> float:
        """What the second factor adds to f in its denominator, for a text of so many terms."""
        return self.k1 * (1 - self.b + self.b * length * len(self._counts) / max(1, self._total))

    def _hashed(self, weights: Mapping[str, float]) -> Any:
        import numpy as np

        vector = np.zeros((1, self.dimensions), dtype=np.float32)
        for term, weight in weights.items():
            code = zlib.crc32(term.encode())
            vector[0, code % self.dimensions] += weight if code >> 31 else -weight
        return vector


def best(scores: Mapping[int, float], k: int) -> list[int]:
    """Return the `k` numbers with the highest scores, best first; of equal ones the lower number is first."""
    return sorted(scores, key=lambda number: (-scores[number], number))[:k]


def fill(found: Sequence[int], k: int, total: int) -> list[int]:
    """Return `found`, filled up to `k` with the latest of the numbers below `total` that it lacks."""
    there = set(found)
    latest = (number for number in reversed(range(total)) if number not in there)
    return [*found, *islice(latest, max(0, k - len(found)))]
