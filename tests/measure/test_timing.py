"""The stopwatch."""

from __future__ import annotations

import pytest

from kvexp.measure import timing
from kvexp.measure.timing import Stopwatch


class Clock:
    """A clock that stands still until it is told to move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now


def test_spans_add_up_by_name():
    clock = Clock()
    watch = Stopwatch(clock=clock)
    for seconds in (1.5, 2.5):
        with watch("encode"):
            clock.now += seconds
        clock.now += 10
    with watch("decode"):
        clock.now += 0.5
    assert watch.totals() == {"encode": 4.0, "decode": 0.5}
    assert (watch.count("encode"), watch.mean("encode")) == (2, 2.0)
    assert watch.per_second("decode", 16) == 32.0


def test_what_never_ran_is_none_and_never_zero():
    watch = Stopwatch()
    assert watch.seconds("x") is None and watch.mean("x") is None and watch.per_second("x", 3) is None
    assert watch.count("x") == 0 and watch.totals() == {}
    watch.add("x", 0.0)
    assert watch.seconds("x") == 0.0 and watch.per_second("x", 3) is None
    watch.add("x", 2.0)
    assert watch.per_second("x", 0) is None and watch.per_second("x", 3) == 1.5


def test_nested_spans_hold_their_whole_length():
    clock = Clock()
    watch = Stopwatch(clock=clock)
    with watch("total"):
        clock.now += 1
        with watch("prepare"):
            clock.now += 2
    assert watch.totals() == {"prepare": 2.0, "total": 3.0}


def test_a_span_that_ends_in_an_exception_counts():
    clock = Clock()
    watch = Stopwatch(clock=clock)
    with pytest.raises(ValueError), watch("encode"):
        clock.now += 3
        raise ValueError
    assert watch.seconds("encode") == 3.0


def test_work_still_queued_on_the_device_belongs_to_the_span(monkeypatch):
    clock = Clock()
    waits: list[str] = []

    def wait(device: str) -> None:
        waits.append(device)
        clock.now += 2

    monkeypatch.setattr(timing, "synchronise", wait)
    watch = Stopwatch("cuda:1", clock=clock)
    with watch("encode"):
        clock.now += 1
    assert waits == ["cuda:1", "cuda:1"]
    assert watch.seconds("encode") == 3.0


def test_the_cpu_needs_no_waiting():
    timing.synchronise("cpu")
