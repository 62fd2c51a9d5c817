"""The bootstrap over problems and the answers within them."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvexp.tasks import metrics, nested

scores = st.floats(0, 1, allow_nan=False)


def exact_spread(problems):
    """The standard deviation over every equally likely resample, by enumeration."""
    n = len(problems)
    draws = []
    for chosen in itertools.product(range(n), repeat=n):
        means = [
            [statistics.fmean(c) for c in itertools.product(problems[i], repeat=len(problems[i]))]
            for i in chosen
        ]
        weight = 1 / n**n
        for combination in itertools.product(*means):
            draws.append((statistics.fmean(combination), weight / np.prod([len(m) for m in means])))
    mean = sum(value * share for value, share in draws)
    return mean, sum(share * (value - mean) ** 2 for value, share in draws) ** 0.5


@given(st.lists(scores, min_size=1, max_size=12), st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_one_answer_a_problem_is_the_plain_bootstrap(values, seed):
    assert nested.bootstrap([[value] for value in values], seed) == metrics.bootstrap(values, seed)
    pairs = [[value] for value in values], [[1 - value] for value in values]
    flat = [a for (a,) in pairs[0]], [b for (b,) in pairs[1]]
    assert nested.paired_difference(*pairs, seed) == metrics.paired_difference(*flat, seed)


def test_the_error_is_that_of_every_resample():
    problems = [[1.0, 0.0], [1.0, 1.0, 0.0], [0.0]]
    mean, spread = exact_spread(problems)
    assert mean == pytest.approx((1 / 2 + 2 / 3 + 0) / 3)
    found = [nested.bootstrap(problems, seed) for seed in range(20)]
    assert all(one.value == pytest.approx(mean) for one in found)
    assert statistics.fmean(one.stderr for one in found) == pytest.approx(spread, rel=0.03)


def test_answers_that_vary_widen_the_error():
    steady, varied = [[0.5] * 4] * 6, [[0.0, 1.0, 0.0, 1.0]] * 6
    assert nested.bootstrap(steady).stderr == 0
    # Every problem has the mean 1/2, so all of the error is of drawing 4 answers from two values: 1/4 each.
    assert nested.bootstrap(varied).stderr == pytest.approx(0.25 / 6**0.5, rel=0.1)


@given(st.lists(st.lists(scores, min_size=1, max_size=4), min_size=1, max_size=8))
@settings(max_examples=25, deadline=None)
def test_an_interval_lies_within_the_scores_and_around_nothing_else(problems):
    found = nested.bootstrap(problems)
    every = [value for answers in problems for value in answers]
    assert min(every) - 1e-9 <= found.low <= found.high <= max(every) + 1e-9
    assert (found.stderr is None) == (len(problems) == 1)


def test_problems_stay_paired_and_answers_do_not():
    hard_and_easy = [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    same = nested.paired_difference(hard_and_easy, hard_and_easy)
    assert (same.value, same.stderr, same.low, same.high, same.wins, same.losses) == (0, 0, 0, 0, 0, 0)
    mixed = [[0.0, 1.0]] * 4
    gap = nested.paired_difference(mixed, mixed)
    # Each mean of two answers out of {0, 1} has variance 1/8, and the two runs draw theirs apart.
    assert gap.value == 0 and gap.stderr == pytest.approx((2 / 8 / 4) ** 0.5, rel=0.1)


def test_nothing_to_score_is_refused():
    for wrong in ([], [[1.0], []]):
        with pytest.raises(ValueError, match="to score"):
            nested.bootstrap(wrong)
    with pytest.raises(ValueError, match="not pairs"):
        nested.paired_difference([[1.0]], [[1.0], [0.0]])


def test_the_metric_of_a_record():
    found = nested.mean([[1.0, 0.0], [1.0, 1.0]], higher_is_better=False)
    assert (found["value"], found["n"], found["higher_is_better"]) == (0.75, 2, False)
    assert found["stderr"] > 0
