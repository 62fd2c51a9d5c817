"""Scores over documents, their standard errors, and whether two runs differ on the same documents.

Standard errors come from the bootstrap over documents: `RESAMPLES` samples with replacement, from a fixed
seed, so that a repeated run gives the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypedDict

import numpy as np

RESAMPLES = 1000
_CELLS = 4_000_000  # counts held at a time: bounds memory on large sets


class Metric(TypedDict):
    """A figure over `n` documents with its standard error (None for one document, which tells none)."""

    value: float
    stderr: float | None
    n: int
    higher_is_better: bool


class Interval(NamedTuple):
    """A mean over documents, its bootstrap standard error, and the central 95 % of the bootstrap.

    One document tells no standard error: it is None.
    """

    value: float
    stderr: float | None
    low: float
    high: float


class Difference(NamedTuple):
    """Run a minus run b over the same `n` documents: an interval, documents won and lost, and McNemar's p."""

    value: float
    stderr: float | None
    low: float
    high: float
    wins: int
    losses: int
    p: float
    n: int


def first_line(text: str, stop: Sequence[str] = ("\n",)) -> str:
    """Return what free generation answered: the text before the first stop string, stripped."""
    for mark in stop:
        text = text.split(mark, 1)[0]
    return text.strip()


def same(answer: str, expected: str) -> bool:
    """Return whether two answers agree but for case and spacing."""
    return answer.casefold().split() == expected.casefold().split()


def accuracy(right: Sequence[bool], seed: int = 0) -> Metric:
    """Return the share of documents that are right."""
    return mean([float(hit) for hit in right], higher_is_better=True, seed=seed)


def mean(values: Sequence[float], higher_is_better: bool, seed: int = 0) -> Metric:
    """Return the mean over documents."""
    interval = bootstrap(values, seed)
    return _metric(interval.value, interval.stderr, len(values), higher_is_better)


def median(values: Sequence[float], higher_is_better: bool, seed: int = 0) -> Metric:
    """Return the median over documents, of two middle values their mean."""
    data = np.sort(_data(values))
    low, high = (len(data) - 1) // 2, len(data) // 2

    def of(counts: np.ndarray) -> np.ndarray:
        upto = counts.cumsum(1)  # [R, n], how many of a resample are at most value i
        at_low, at_high = (data[(upto > place).argmax(1)] for place in (low, high))
        return (at_low + at_high) / 2

    draws = np.concatenate([of(counts) for counts in _resamples(len(data), seed)])
    return _metric(float(np.median(data)), _spread(draws), len(data), higher_is_better)


def macro_f1(expected: Sequence[str], answered: Sequence[str], seed: int = 0) -> Metric:
    """Return the unweighted mean of F1 over the labels that occur among expected or answered ones.

    A label that occurs in neither does not count; one that is expected but never answered, or answered but
    never expected, counts as 0. This is scikit-learn's `f1_score(average="macro", zero_division=0)`. Each
    resample counts the labels that occur in it.
    """
    if len(expected) != len(answered) or not expected:
        raise ValueError(f"{len(expected)} expected and {len(answered)} answered documents")
    labels = sorted({*expected, *answered})
    gold = np.array([[label == found for label in labels] for found in expected], dtype=np.float64)
    said = np.array([[label == found for label in labels] for found in answered], dtype=np.float64)

    def of(counts: np.ndarray) -> np.ndarray:
        found, hits = counts @ (gold + said), counts @ (gold * said)  # [R, labels]
        f1 = np.divide(2 * hits, found, out=np.zeros_like(hits), where=found > 0)
        return f1.sum(1) / (found > 0).sum(1)

    draws = np.concatenate([of(counts) for counts in _resamples(len(expected), seed)])
    value = of(np.ones((1, len(expected))))[0]
    return _metric(float(value), _spread(draws), len(expected), True)


def bootstrap(values: Sequence[float], seed: int = 0) -> Interval:
    """Return the mean over documents with its standard error and 95 % interval.

    For the difference of two runs, give the difference at each document: they stay paired.
    """
    data = _data(values)
    draws = np.concatenate([counts @ data / len(data) for counts in _resamples(len(data), seed)])
    low, high = np.quantile(draws, [0.025, 0.975])
    stderr = _spread(draws) if len(data) > 1 else None
    return Interval(float(data.mean()), stderr, float(low), float(high))


def paired_difference(a: Sequence[float], b: Sequence[float], seed: int = 0) -> Difference:
    """Return the mean of run a minus that of run b over the same documents in the same order."""
    gaps = [float(x) - float(y) for x, y in zip(a, b, strict=True)]
    wins, losses = _split(a, b)
    interval = bootstrap(gaps, seed)._asdict()
    return Difference(**interval, wins=wins, losses=losses, p=mcnemar(a, b), n=len(gaps))


def mcnemar(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the exact two-sided McNemar probability for two runs over the same documents.

    How likely is a split of the documents that differ at least as uneven as this one, if chance alone decides
    which run does better on each?
    """
    wins, losses = _split(a, b)
    differing = wins + losses
    tail = sum(math.comb(differing, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**differing)


def _split(a: Sequence[float], b: Sequence[float]) -> tuple[int, int]:
    pairs = list(zip(a, b, strict=True))
    return sum(x > y for x, y in pairs), sum(x < y for x, y in pairs)


def _resamples(n: int, seed: int) -> Iterator[np.ndarray]:
    """Yield, in blocks of rows, how often each document occurs in each resample."""
    rng = np.random.default_rng(seed)
    block = max(1, min(RESAMPLES, _CELLS // n))
    for start in range(0, RESAMPLES, block):
        rows = min(block, RESAMPLES - start)
        yield rng.multinomial(n, np.full(n, 1 / n), size=rows).astype(np.float64)


def _metric(value: float, stderr: float | None, n: int, higher_is_better: bool) -> Metric:
    return {"value": value, "stderr": stderr if n > 1 else None, "n": n, "higher_is_better": higher_is_better}


def _spread(draws: np.ndarray) -> float:
    return float(draws.std(ddof=1))


def _data(values: Sequence[float]) -> np.ndarray:
    if not len(values):
        raise ValueError("no documents to score")
    return np.asarray(values, dtype=np.float64)
