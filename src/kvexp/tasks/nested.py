"""Bootstrap over problems that were answered several times: problems are drawn, then answers within each.

With one answer a problem this is `metrics.bootstrap`. With several (mean@k), a resample draws problems with
replacement and, in every drawn problem, as many of its answers with replacement: the error then holds both
which problems were asked and what sampling made of them. Two runs are compared on the same drawn problems,
each with its own draw of answers, since answers to one problem are not paired between runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvexp.tasks import metrics
from kvexp.tasks.metrics import Difference, Interval, Metric

Problems = Sequence[Sequence[float]]
Draw = Callable[[np.random.Generator, np.ndarray], np.ndarray]


def mean(problems: Problems, higher_is_better: bool, seed: int = 0) -> Metric:
    """Return the mean over problems of the mean over their answers."""
    found = bootstrap(problems, seed)
    return {
        "value": found.value,
        "stderr": found.stderr,
        "n": len(problems),
        "higher_is_better": higher_is_better,
    }


def bootstrap(problems: Problems, seed: int = 0) -> Interval:
    """Return the mean with its standard error and 95 % interval over problems and answers within them."""
    means = _means(problems)
    if _single(problems):
        return metrics.bootstrap(means, seed)
    draws = np.concatenate(list(_resampled(len(problems), [_drawer(problems)], seed)))
    return _interval(means, draws)


def paired_difference(a: Problems, b: Problems, seed: int = 0) -> Difference:
    """Return the mean of run a minus that of run b over the same problems in the same order.

    Problems are won and lost by their means. Raises ValueError when the runs differ in length.
    """
    ours, theirs = _means(a), _means(b)
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} problems of one run and {len(theirs)} of the other are not pairs")
    plain = metrics.paired_difference(ours, theirs, seed)
    if _single(a) and _single(b):
        return plain
    draws = np.concatenate(list(_resampled(len(ours), [_drawer(a), _drawer(b)], seed)))
    gaps = [x - y for x, y in zip(ours, theirs, strict=True)]
    return plain._replace(**_interval(gaps, draws)._asdict())


def _resampled(n: int, drawers: Sequence[Draw], seed: int) -> Iterator[np.ndarray]:
    """Yield blocks of resampled means; of two drawers the first minus the second, on the same problems."""
    rng = np.random.default_rng(seed)
    block = max(1, min(metrics.RESAMPLES, 500_000 // n))
    for start in range(0, metrics.RESAMPLES, block):
        problems = rng.integers(n, size=(min(block, metrics.RESAMPLES - start), n))
        first, *rest = [draw(rng, problems).mean(1) for draw in drawers]
        yield first - rest[0] if rest else first


def _drawer(problems: Problems) -> Draw:
    """Return what draws answers within problems [R, n] and gives their means [R, n]."""
    counts = np.array([len(answers) for answers in problems])
    padded = np.zeros((len(problems), counts.max()))
    for row, answers in enumerate(problems):
        padded[row, : len(answers)] = answers

    def draw(rng: np.random.Generator, drawn: np.ndarray) -> np.ndarray:
        available, total = counts[drawn], np.zeros(drawn.shape)
        for place in range(padded.shape[1]):
            picked = rng.integers(available)
            total += np.where(place < available, padded[drawn, picked], 0)
        return total / available

    return draw


def _means(problems: Problems) -> list[float]:
    if not problems or not all(len(answers) for answers in problems):
        raise ValueError("no problems, or a problem without an answer, to score")
    return [float(np.mean(answers)) for answers in problems]


def _single(problems: Problems) -> bool:
    return all(len(answers) == 1 for answers in problems)


def _interval(means: Sequence[float], draws: np.ndarray) -> Interval:
    low, high = np.quantile(draws, [0.025, 0.975])
    # One problem with several answers tells how answers vary, which is not an error over problems.
    stderr = float(draws.std(ddof=1)) if len(means) > 1 else None
    return Interval(float(np.mean(means)), stderr, float(low), float(high))
