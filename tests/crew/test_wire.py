"""What an end makes of what comes: whole messages, of bounded size; and a silent process is no busy one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvexp.crew import wire
from kvexp.crew.line import Caller, Hub
from kvexp.crew.wire import End, LineLost, Silent
from waiting import until

ROOT = Path(__file__).parents[2]
OTHER = """
import sys, time
from kvexp.crew.line import Caller
Caller("127.0.0.1", int(sys.argv[1]), sys.argv[2], 1, lambda *why: sys.exit(1), float(sys.argv[3]))
time.sleep(60)
"""
FIRST = """
import time
from kvexp.crew.line import Hub
hub = Hub(2, lambda *why: None, 1.0)
print(*hub.address, flush=True)
hub.wait()
time.sleep(60)
"""


@pytest.fixture
def pair() -> Iterator[tuple[End, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        end = End(server.accept()[0], 0.4)
    yield end, theirs
    end.close()
    theirs.close()


def test_messages_come_whole_however_they_are_cut(pair: Any) -> None:
    end, theirs = pair
    for piece in (b'\n{"a": ', b"1}\n\n\n", b'{"b": [2, null]}\n{"c"', b": 3}\n"):
        theirs.sendall(piece)
        time.sleep(0.02)
    assert [end.receive() for _ in range(3)] == [{"a": 1}, {"b": [2, None]}, {"c": 3}]
    theirs.close()
    assert end.receive() is None


@pytest.mark.parametrize("row", [b"[1]\n", b"nonsense\n", b"\xff\n", b"[" * 100_000 + b"\n", b'{"torn": 1'])
def test_what_is_no_message_ends_the_line(pair: Any, row: bytes) -> None:
    end, theirs = pair
    theirs.sendall(row)
    theirs.close()
    assert end.receive() is None


def test_messages_are_bounded(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    end, theirs = pair
    monkeypatch.setattr(wire, "LARGEST", 100)
    with pytest.raises(ValueError, match=r"a message of \d+ bytes between processes: 100 at most"):
        end.send({"value": "x" * 100})
    theirs.sendall(b'"' + b"x" * 200)
    assert end.receive(100) is None


def test_silence_is_told_and_a_sign_of_life_ends_it(pair: Any) -> None:
    end, theirs = pair
    begun = time.monotonic()
    for _ in range(3):
        time.sleep(0.2)
        theirs.sendall(b"\n")
    with pytest.raises(Silent, match=r"no sign of life for 0\.4 s"):
        end.receive()
    assert 0.95 < time.monotonic() - begun < 3


def test_a_sign_of_life_waits_for_nobody(pair: Any) -> None:
    """Not for one that does not read, whose buffers are full, and not in the middle of a message."""
    end, _ = pair
    end._connection.setblocking(False)
    with pytest.raises(LineLost):
        end.send({"value": "x" * 50_000_000})
    end._connection.setblocking(True)
    begun = time.monotonic()
    end.beat()
    with end._sending:
        end.beat()
    assert time.monotonic() - begun < 0.5


def program(text: str, *words: object) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        [sys.executable, "-c", text, *map(str, words)], env=environment, stdout=subprocess.PIPE, text=True
    )


def test_a_rank_that_is_stopped_is_noticed() -> None:
    """And ends when it goes on, since its line is closed."""
    lost: list[Any] = []
    hub = Hub(2, lambda *what: lost.append(what), 1.0)
    other = program(OTHER, *hub.address, 1.0)
    hub.wait()
    time.sleep(1.5)
    assert not lost
    other.send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    until(lambda: lost, 10)
    assert 0.7 < time.monotonic() - begun < 5
    [(who, reason, user)] = lost
    assert who.startswith(f"rank 1 (process {other.pid} on ") and not user
    assert reason == "no sign of life for 1 s"
    other.kill()
    other.communicate()
    hub.close()


def test_a_first_rank_that_is_stopped_is_noticed() -> None:
    first = program(FIRST)
    assert first.stdout is not None
    port, token = first.stdout.readline().split()
    lost: list[Any] = []
    caller = Caller("127.0.0.1", int(port), token, 1, lambda *why: lost.append(why), 1.0)
    time.sleep(0.3)
    assert not lost
    first.send_signal(signal.SIGSTOP)
    until(lambda: lost, 10)
    assert lost == [("no sign of life for 1 s", False)]
    first.kill()
    first.communicate()
    caller.close()


def test_who_was_stopped_itself_blames_nobody() -> None:
    """Ctrl-Z stops all processes of a run for as long as one likes, and they go on together."""
    first = program(FIRST)
    assert first.stdout is not None
    port, token = first.stdout.readline().split()
    other = program(OTHER, port, token, 1.0)
    time.sleep(1.0)
    for one in (first, other):
        one.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    for one in (first, other):
        one.send_signal(signal.SIGCONT)
    time.sleep(1.0)
    assert first.poll() is None and other.poll() is None
    for one in (first, other):
        one.kill()
        one.communicate()
