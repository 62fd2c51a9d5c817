"""Progress of long work, with a clock that the tests turn."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import pytest

from kvexp import progress
from waiting import until


class _Clock:
    """Stands for time.perf_counter; `work` moves it while items are taken."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def work(clock: _Clock, items: object, seconds: float, **options: object) -> list[object]:
    done = []
    for item in progress.track(items, "scoring", **options):  # type: ignore[arg-type, var-annotated]
        clock.now += seconds
        done.append(item)
    return done


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_short_work_says_nothing(clock: _Clock, capsys: pytest.CaptureFixture[str]) -> None:
    assert work(clock, [1, 2, 3], 3.0) == [1, 2, 3]
    assert work(clock, [], 3.0) == []
    assert lines(capsys) == []


def test_a_first_item_that_takes_long_is_begun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY", 0.05)
    for item in progress.track(["a", "b"], "scoring", unit="batches"):
        if item == "a":
            until(lambda: "0/2" in capsys.readouterr().err, 10)
    assert "0/2" not in capsys.readouterr().err


def test_a_line_every_ten_seconds_and_one_at_the_end(
    clock: _Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    assert work(clock, range(7), 4.0, unit="batches") == list(range(7))
    assert lines(capsys) == [
        "scoring: 3/7 (0.25 batches/s, 16 s left)",
        "scoring: 6/7 (0.25 batches/s, 4 s left)",
        "scoring: 7/7 (0.25 batches/s, 0 s left)",
    ]


def test_the_last_line_is_not_said_twice(clock: _Clock, capsys: pytest.CaptureFixture[str]) -> None:
    work(clock, range(2), 10.0)
    assert lines(capsys) == [
        "scoring: 1/2 (0.10 it/s, 10 s left)",
        "scoring: 2/2 (0.10 it/s, 0 s left)",
    ]


def test_work_of_unknown_length_has_no_time_left(clock: _Clock, capsys: pytest.CaptureFixture[str]) -> None:
    assert work(clock, iter("ab"), 10.0) == ["a", "b"]
    assert lines(capsys) == ["scoring: 1 (0.10 it/s)", "scoring: 2 (0.10 it/s)"]


def test_a_length_may_be_told(clock: _Clock, capsys: pytest.CaptureFixture[str]) -> None:
    work(clock, iter("ab"), 10.0, total=5)
    assert lines(capsys)[0] == "scoring: 1/5 (0.10 it/s, 40 s left)"


def test_items_are_taken_one_at_a_time(clock: _Clock) -> None:
    taken = []

    def items() -> Iterator[int]:
        for number in range(5):
            taken.append(number)
            yield number

    for number in progress.track(items(), "scoring"):
        assert taken == list(range(number + 1))
        if number == 2:
            break
    assert taken == [0, 1, 2]


def test_an_error_of_the_items_passes_through(clock: _Clock) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("row")

    with pytest.raises(KeyError, match="row"):
        list(progress.track(items(), "scoring"))


class _Terminal(io.StringIO):
    """A standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("total", [None, 3])
def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch, total: int | None) -> None:
    screen = _Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    assert list(progress.track(iter([1, 2, 3]), "scoring", total, "docs")) == [1, 2, 3]
    shown = screen.getvalue()
    assert "scoring" in shown and "docs/s" in shown
    assert ("3/3" if total else "3/?") in shown


def test_an_error_leaves_no_bar_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", _Terminal())
    tracked = progress.track([1, 2], "scoring")
    next(tracked)
    with pytest.raises(ZeroDivisionError):
        tracked.throw(ZeroDivisionError)
    assert list(progress.track([1], "again")) == [1]  # a second live display would be refused
