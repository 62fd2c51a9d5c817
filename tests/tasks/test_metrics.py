"""Scores against hand-computed values, scikit-learn and resamples written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score

from kvexp.errors import UserError
from kvexp.tasks import metrics, scores
from kvexp.tasks.metrics import (
    accuracy,
    bootstrap,
    first_line,
    macro_f1,
    mcnemar,
    mean,
    median,
    paired_difference,
    same,
)

LABELS = st.sampled_from(["red", "blue", "green", "gold"])
HITS = st.lists(st.booleans(), min_size=1, max_size=60)


def written_out(n: int, statistic) -> float:
    """The standard error of a statistic over the resamples, each written out as a list of places."""
    draws = [
        statistic(np.repeat(np.arange(n), counts.astype(int)))
        for block in metrics._resamples(n, 0)
        for counts in block
    ]
    return float(np.std(draws, ddof=1))


def test_accuracy():
    found = accuracy([True, False, True, True])
    assert found["value"] == 0.75
    assert (found["n"], found["higher_is_better"]) == (4, True)


def test_standard_error_of_accuracy_is_that_of_a_share():
    found = accuracy([True] * 150 + [False] * 50)
    assert found["stderr"] == pytest.approx(math.sqrt(0.75 * 0.25 / 200), rel=0.1)
    assert accuracy([True] * 20)["stderr"] == 0


def test_mean_and_median():
    assert mean([1.0, 2.0, 6.0], higher_is_better=False)["value"] == 3
    assert median([6.0, 1.0, 2.0], higher_is_better=False)["value"] == 2
    assert median([6.0, 1.0, 2.0, 3.0], higher_is_better=False)["value"] == 2.5
    assert median([4.0] * 9, higher_is_better=True)["stderr"] == 0
    assert mean([1.0], higher_is_better=False) == {
        "value": 1,
        "stderr": None,
        "n": 1,
        "higher_is_better": False,
    }


def test_standard_errors_equal_resamples_written_out():
    rng = np.random.default_rng(1)
    data = np.sort(rng.exponential(size=23))
    assert mean(list(data), True)["stderr"] == pytest.approx(written_out(23, lambda at: data[at].mean()))
    assert median(list(data), True)["stderr"] == pytest.approx(
        written_out(23, lambda at: np.median(data[at]))
    )
    even = data[:-1]
    assert median(list(even), True)["stderr"] == pytest.approx(
        written_out(22, lambda at: np.median(even[at]))
    )
    gold, said = rng.integers(0, 5, 23).astype(str), rng.integers(0, 5, 23).astype(str)
    expected = written_out(23, lambda at: f1_score(gold[at], said[at], average="macro", zero_division=0))
    assert macro_f1(list(gold), list(said))["stderr"] == pytest.approx(expected)


def test_large_sets_are_resampled_in_blocks(monkeypatch):
    whole = np.concatenate(list(metrics._resamples(50, 3)))
    monkeypatch.setattr(metrics, "_CELLS", 50 * 7)
    blocks = list(metrics._resamples(50, 3))
    assert len(blocks) == math.ceil(metrics.RESAMPLES / 7)
    assert np.array_equal(np.concatenate(blocks), whole)
    assert (whole.sum(1) == 50).all()


def test_macro_f1_by_hand():
    # a: 1 of 2 found, 1 answered: 2/3; b: 1 of 1, 2 answered: 2/3; c never answered, d never expected: 0
    found = macro_f1(["a", "a", "b", "c"], ["a", "b", "b", "d"])
    assert found["value"] == pytest.approx((2 / 3 + 2 / 3) / 4)
    assert macro_f1(["a", "b"], ["a", "b"])["value"] == 1


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(LABELS, LABELS), min_size=1, max_size=40))
def test_macro_f1_is_that_of_scikit_learn(pairs):
    expected, answered = [a for a, _ in pairs], [b for _, b in pairs]
    theirs = f1_score(expected, answered, average="macro", zero_division=0)
    assert macro_f1(expected, answered)["value"] == pytest.approx(theirs)


@pytest.mark.parametrize(
    ("wins", "losses", "p"),
    [
        (0, 0, 1.0),
        (5, 0, 2 / 32),
        (3, 3, 1.0),
        (1, 7, 2 * (1 + 8) / 256),
        (21, 4, 2 * (1 + 25 + 300 + 2300 + 12650) / 2**25),
    ],
)
def test_mcnemar_by_hand(wins, losses, p):
    a = [1.0] * wins + [0.0] * losses + [1.0, 0.0]
    b = [0.0] * wins + [1.0] * losses + [1.0, 0.0]
    assert mcnemar(a, b) == pytest.approx(p, rel=1e-12)
    assert mcnemar(b, a) == mcnemar(a, b)


def test_mcnemar_of_many_documents_is_finite():
    assert 0 < mcnemar([1] * 1600 + [0] * 1400, [0] * 1600 + [1] * 1400) < 0.01


def test_paired_difference():
    a, b = [True, True, True, False, False], [True, False, False, True, False]
    found = paired_difference(a, b)
    assert found.value == pytest.approx(0.2)
    assert (found.wins, found.losses, found.n, found.p) == (2, 1, 5, 1.0)
    assert found.low <= found.value <= found.high
    with pytest.raises(ValueError):
        paired_difference([True], [True, False])


def test_pairing_is_tighter_than_two_runs_apart():
    a = [i % 3 > 0 for i in range(300)]
    b = [hit and i % 10 > 0 for i, hit in enumerate(a)]
    apart = math.hypot(accuracy(a)["stderr"], accuracy(b)["stderr"])
    assert paired_difference(a, b).stderr < apart / 1.5


def test_interval_covers_the_central_share():
    rng = np.random.default_rng(0)
    covered = sum(
        (interval := bootstrap(list(rng.normal(size=60)), seed=i)).low <= 0 <= interval.high
        for i in range(150)
    )
    assert 0.88 <= covered / 150 <= 0.99


@settings(deadline=None, max_examples=25)
@given(HITS, st.integers(0, 3))
def test_a_difference_mirrors_and_repeats(hits, seed):
    other = hits[::-1]
    there, back = paired_difference(hits, other, seed), paired_difference(other, hits, seed)
    assert there == paired_difference(hits, other, seed)
    assert there.value == pytest.approx(-back.value)
    assert (there.wins, there.losses, there.p) == (back.losses, back.wins, back.p)
    assert there.stderr == pytest.approx(back.stderr)
    assert paired_difference(hits, hits).value == 0 and paired_difference(hits, hits).p == 1


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" card arrival\nQuery: next", "card arrival"),
        ("red", "red"),
        ("\nred", ""),
        (" red \r\n", "red"),
        ("", ""),
    ],
)
def test_first_line(text, answer):
    assert first_line(text) == answer


def test_first_line_with_other_stops():
    assert first_line(" yes. no", stop=(".", "\n")) == "yes"
    assert first_line(" a\nb", stop=()) == "a\nb"


def test_answers_agree_but_for_case_and_spacing():
    assert same(" Card  arrival ", "card arrival")
    assert not same("card arrivals", "card arrival")


def test_nothing_to_score_is_an_error():
    for score in (
        lambda: accuracy([]),
        lambda: macro_f1([], []),
        lambda: macro_f1(["a"], []),
        lambda: bootstrap([]),
    ):
        with pytest.raises(ValueError):
            score()


def test_one_document_tells_no_standard_error():
    for metric in (accuracy([True]), metrics.mean([0.5], False), metrics.median([0.5], False)):
        assert metric["stderr"] is None and metric["n"] == 1
    assert macro_f1(["a"], ["a"])["stderr"] is None
    assert metrics.paired_difference([1.0], [0.0]).stderr is None


@pytest.mark.parametrize(
    "other", [{"accuracy": 1.0, "foreign": 1.0}, {}, {"accuracy": "high"}, {"foreign": 1.0}, None]
)
def test_samples_with_foreign_scores_are_refused(other):
    ours = {"id": "a", "scores": {"accuracy": 1.0}, "expected": "x", "answer": "x", "answer_calibrated": "x"}
    for samples in ([ours, {**ours, "scores": other}], [{**ours, "scores": other}, ours]):
        with pytest.raises(UserError, match=r"other scores than the first one: start with resume=false"):
            scores.label_metrics(samples)
