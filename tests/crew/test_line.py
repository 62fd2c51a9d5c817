"""Messages come in order, strangers are not let in, and an end is told of at once, with its reason."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvexp.crew.line import Caller, Hub, LineLost
from waiting import until


class Party:
    """A hub with callers in one process."""

    def __init__(self, world: int) -> None:
        self.lost: list[tuple[str, str, bool]] = []
        self.alone: list[int] = []
        self.hub = Hub(world, lambda *what: self.lost.append(what))
        port, token = self.hub.address
        waiting = threading.Thread(target=self.hub.wait)
        waiting.start()
        self.callers = [
            Caller("127.0.0.1", port, token, rank, lambda *why, rank=rank: self.alone.append(rank))
            for rank in reversed(range(1, world))
        ][::-1]
        waiting.join(10)


@pytest.fixture
def party() -> Iterator[Callable[[int], Party]]:
    made: list[Party] = []

    def make(world: int) -> Party:
        made.append(Party(world))
        return made[-1]

    yield make
    for one in made:
        one.hub.close()


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


def test_strangers_are_not_let_in() -> None:
    lost: list[Any] = []
    hub = Hub(2, lambda *what: lost.append(what))
    port, token = hub.address
    waiting = threading.Thread(target=hub.wait)
    waiting.start()
    for hello in (
        b"GET / HTTP/1.1\r\n",
        b"\xff\xfe\n",
        json.dumps({"token": "x", "rank": 1}).encode() + b"\n",
    ):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(hello)
    caller = Caller("127.0.0.1", port, token, 1, lambda *why: None)
    waiting.join(10)
    caller.gather("me")
    assert hub.gather(None) == [None, "me"] and not lost
    hub.close()
