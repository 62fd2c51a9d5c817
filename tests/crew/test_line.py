"""Messages come in order, strangers are not let in, and an end is told of at once, with its reason."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvexp.crew import line
from kvexp.crew.crew import Member
from kvexp.crew.line import Caller, Hub
from kvexp.crew.wire import SILENCE, LineLost
from kvexp.errors import UserError
from waiting import until


class Party:
    """A hub with callers in one process."""

    def __init__(self, world: int, silence: float = SILENCE) -> None:
        self.lost: list[tuple[str, str, bool]] = []
        self.alone: list[int] = []
        self.hub = Hub(world, lambda *what: self.lost.append(what), silence)
        port, token = self.hub.address
        waiting = threading.Thread(target=self.hub.wait)
        waiting.start()
        self.callers = [
            Caller("127.0.0.1", port, token, rank, lambda *why, rank=rank: self.alone.append(rank), silence)
            for rank in reversed(range(1, world))
        ][::-1]
        waiting.join(10)


@pytest.fixture
def party() -> Iterator[Callable[..., Party]]:
    made: list[Party] = []

    def make(*knobs: Any) -> Party:
        made.append(Party(*knobs))
        return made[-1]

    yield make
    for one in made:
        one.hub.close()
        for caller in one.callers:
            caller.close()


def test_values_are_gathered_in_the_order_of_ranks_and_given_to_all(party: Any) -> None:
    three = party(3)
    for value in ({"a": [1, None]}, "b", 0.5):
        assert [caller.gather([value, rank]) for rank, caller in enumerate(three.callers, 1)] == [[], []]
        assert three.hub.gather(value) == [value, [value, 1], [value, 2]]
        three.hub.broadcast(value)
        assert [caller.broadcast() for caller in three.callers] == [value, value]


@pytest.mark.parametrize(
    ("bye", "lost"),
    [
        (None, ("it ended without a word", False)),
        (("out of memory", False), ("out of memory", False)),
        (("no such file", True), ("no such file", True)),
    ],
)
def test_an_end_is_told_of_with_its_reason(party: Any, bye: Any, lost: tuple[str, bool]) -> None:
    two = party(2)
    if bye:
        two.callers[0].bye(*bye)
    else:
        two.callers[0]._end.close()
    until(lambda: two.lost)
    [(who, *why)] = two.lost
    assert who.startswith("rank 1 (process ") and tuple(why) == lost
    with pytest.raises(LineLost):
        two.hub.gather(1)


def test_who_has_done_its_part_may_go(party: Any) -> None:
    two = party(2)
    two.callers[0].gather("last")
    two.callers[0].bye()
    two.callers[0]._end.close()
    assert two.hub.gather("mine") == ["mine", "last"]
    time.sleep(0.1)
    assert not two.lost


def test_an_end_that_is_well_is_no_alarm(party: Any) -> None:
    three = party(3)
    three.hub.broadcast("done")
    three.hub.close(well=True)
    assert [caller.broadcast() for caller in three.callers] == ["done", "done"]
    time.sleep(0.1)
    assert not three.alone


def test_callers_learn_of_the_end_of_the_hub(party: Any) -> None:
    three = party(3)
    three.hub.close()
    until(lambda: len(three.alone) == 2)
    with pytest.raises(LineLost):
        three.callers[0].broadcast()


class Waiting:
    """A hub of two ranks that waits for the other."""

    def __init__(self) -> None:
        self.lost: list[Any] = []
        self.hub = Hub(2, lambda *what: self.lost.append(what))
        self.port, self.token = self.hub.address
        self._thread = threading.Thread(target=self.hub.wait)
        self._thread.start()

    def says(self, row: bytes) -> socket.socket:
        """A connection on which something was said."""
        stranger = socket.create_connection(("127.0.0.1", self.port))
        stranger.sendall(row)
        return stranger

    def end(self) -> None:
        """The other rank comes, and all is as if nobody else had been there."""
        caller = Caller("127.0.0.1", self.port, self.token, 1, lambda *why: None)
        self._thread.join(10)
        caller.gather("me")
        assert self.hub.gather(None) == [None, "me"] and not self.lost
        self.hub.close()
        caller.close()


def hello(token: object, rank: object) -> bytes:
    return json.dumps({"token": token, "rank": rank}).encode() + b"\n"


def test_strangers_are_not_let_in() -> None:
    waiting = Waiting()
    right = waiting.token
    for row in (b"GET / HTTP/1.1\r\n", b"\xff\xfe\n", b"[" * 1900 + b"\n", hello("x", 1), hello("\udcff", 1)):
        waiting.says(row).close()
    for rank in (0, 2, -1, "1", None, [1], 1.5):
        waiting.says(hello(right, rank)).close()
    waiting.end()


def test_a_stranger_who_never_ends_its_sentence_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock, however much it says, and by what it says, however fast."""
    monkeypatch.setattr(line, "HELLO_SECONDS", 0.3)
    waiting = Waiting()
    slow = waiting.says(b"x")
    begun, over = time.monotonic(), False
    while not over:
        time.sleep(0.1)
        try:
            slow.sendall(b"x")
        except OSError:
            over = True
        assert time.monotonic() < begun + 5
    monkeypatch.setattr(line, "HELLO_SECONDS", 60)
    fast = waiting.says(b"x" * (line.HELLO_BYTES + 100_000))
    waiting.end()
    for one in (slow, fast):
        one.close()


def test_a_rank_that_nobody_hears_of_is_not_waited_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers that call meanwhile do not prolong it."""
    monkeypatch.setattr(line, "JOIN_SECONDS", 0.3)
    hub = Hub(2, lambda *what: None)
    calls = threading.Timer(0.2, lambda: socket.create_connection(("127.0.0.1", hub.address[0])).close())
    calls.start()
    begun = time.monotonic()
    with pytest.raises(LineLost, match=r"1 of 2 processes came within 0\.3 s"):
        hub.wait()
    assert time.monotonic() - begun < 0.45
    calls.join()
    hub.close()


def test_ranks_that_are_busy_are_not_silent(party: Any) -> None:
    """Longer than silence is allowed."""
    two = party(2, 1.0)
    time.sleep(1.7)
    two.callers[0].gather("late")
    assert two.hub.gather("mine") == ["mine", "late"]
    assert not two.lost and not two.alone


def test_a_line_leaves_neither_threads_nor_sockets() -> None:
    before = threading.enumerate()

    def threads() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one not in before]

    three = Party(3, 0.5)
    ends = [*(inbox.end for inbox in three.hub._inboxes.values()), *(caller._end for caller in three.callers)]
    assert len(threads()) == 7  # a pulse each, and one that reads for each end of the two lines
    three.hub.close()
    for caller in three.callers:
        caller.close()
    until(lambda: not threads())
    assert [end._connection.fileno() for end in ends] == [-1] * 4 and three.hub._server.fileno() == -1


def test_who_fails_waits_until_the_first_has_noted_it() -> None:
    """Else a launcher ends the first, because another has ended, before the reason is written."""
    noted: list[float] = []

    def note(*what: Any) -> None:
        time.sleep(0.3)
        noted.append(time.monotonic())

    hub = Hub(2, note)
    port, token = hub.address
    made: list[Member] = []
    joining = threading.Thread(target=lambda: made.append(Member(1, 2, SILENCE, "127.0.0.1", port, token)))
    joining.start()
    hub.wait()
    joining.join()

    def first() -> None:
        until(lambda: noted, 10)
        hub.close()

    threading.Thread(target=first).start()
    with pytest.raises(UserError, match="no such model"), made[0].watched():
        raise UserError("no such model")
    assert noted and time.monotonic() >= noted[0]
    made[0].line.close()
