"""One connection: whole messages as lines of JSON, and between them empty lines, which say "alive".

An end that hears nothing for a time is told that the other is silent: it is stopped, or its machine or the
network is gone. A process that is at work is never silent, since a thread of its own says "alive". What this
cannot notice is a process whose main thread waits or turns for ever while its other threads run.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # a minute without a sign of life
SILENCE = 600.0  # seconds; far above what a machine under load needs, or a call that lets no thread run
BEATS = 10  # signs of life in that time
ENDED = "it ended without a word"
LARGEST = 64 << 20  # bytes of a message; all are numbers of batches and counters


class LineLost(ConnectionError):
    """The other end of a line has gone."""


class Silent(LineLost):
    """The other end gives no sign of life."""


class End:
    """One end of a connection; one thread reads, any may send."""

    def __init__(self, connection: socket.socket, silence: float = SILENCE) -> None:
        """`silence`: seconds without a sign of life after which the other end is given up."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connection.settimeout(None)
        self.silence, self._connection = silence, connection
        self._news, self._sending = select.poll(), threading.Lock()
        self._news.register(connection, select.POLLIN)
        self._read = bytearray()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; LineLost when the line is down, ValueError for one that is too large."""
        row = json.dumps(message).encode() + b"\n"
        if len(row) > LARGEST:
            raise ValueError(f"a message of {len(row)} bytes between processes: {LARGEST} at most")
        try:
            with self._sending:
                self._connection.sendall(row)
        except OSError as error:
            raise LineLost("the line is down") from error

    def beat(self) -> None:
        """Say that this end is alive, unless it is saying something, or the other does not listen."""
        if self._sending.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError):
                    self._connection.send(b"\n", socket.MSG_DONTWAIT)
            finally:
                self._sending.release()

    def receive(self, largest: int = LARGEST, within: float | None = None) -> dict[str, Any] | None:
        """Return the next message, None at the end of the line or where something else comes.

        Raises Silent without a sign of life, or when the message is not there `within` so many seconds.
        """
        end = None if within is None else time.monotonic() + within
        while (row := self._row(largest, end)) is not None:
            if row.strip():
                try:
                    message = json.loads(row)
                except (ValueError, RecursionError):
                    return None
                return message if isinstance(message, dict) else None
        return None

    def hang_up(self) -> None:
        """End the line; whoever reads at either end notices, and `close` can follow there."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the line, and give its socket back; for the thread that reads."""
        self.hang_up()
        self._connection.close()

    def _row(self, largest: int, end: float | None) -> bytes | None:
        begun = 0
        while (found := self._read.find(b"\n", begun)) < 0:
            begun = len(self._read)
            if begun > largest:
                return None
            self._wait(end)
            try:
                more = self._connection.recv(1 << 16)
            except OSError:
                return None
            if not more:
                return None
            self._read += more
        row = bytes(self._read[:found])
        del self._read[: found + 1]
        return row

    def _wait(self, end: float | None) -> None:
        """Wait for anything to come.

        Silence is counted in waits, not by the clock: a process that was stopped itself, by Ctrl-Z or a
        cluster that suspends its job, does not take its own absence for that of the others.
        """
        for _ in range(BEATS):
            left = self.silence / BEATS
            if end is not None:
                left = min(left, end - time.monotonic())
                if left <= 0:
                    break
            if self._news.poll(left * 1000):
                return
        raise Silent(f"no sign of life for {self.silence:g} s")


class Inbox:
    """Messages from one end, in order; the thread that reads them tells why they end, and closes the line."""

    def __init__(self, end: End, tell: Callable[[str, bool], None]) -> None:
        self.end, self._tell = end, tell
        self._messages: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._over, self._down = False, threading.Event()
        threading.Thread(target=self._read, daemon=True, name="kvexp-line").start()

    def take(self) -> dict[str, Any]:
        """Wait for a message; LineLost when none can come any more."""
        with self._news:
            while not self._messages and not self._over:
                self._news.wait()
            if not self._messages:
                raise LineLost("the line has ended")
            return self._messages.pop(0)

    def ended(self, seconds: float) -> bool:
        """Wait until the other end has hung up, so long at most, and return whether it has."""
        return self._down.wait(seconds)

    def _read(self) -> None:
        try:
            while (message := self.end.receive()) is not None:
                if "bye" in message:
                    self._last(message["bye"], bool(message.get("user")))
                else:
                    self._add(message)
            self._last(ENDED, False)
        except Silent as error:
            self._last(str(error), False)
        self.end.close()
        self._down.set()

    def _add(self, message: dict[str, Any]) -> None:
        with self._news:
            self._messages.append(message)
            self._news.notify_all()

    def _last(self, reason: str | None, users: bool) -> None:
        """Tell why no message comes any more, unless the other has done its part; what follows is no news."""
        if self._over:
            return
        if reason is not None:
            self._tell(reason, users)
        with self._news:
            self._over = True
            self._news.notify_all()


class Pulse:
    """A thread that says "alive" on some ends until it is stopped."""

    def __init__(self, ends: Callable[[], Iterable[End]], silence: float) -> None:
        self._ends, self._every, self._stopped = ends, silence / BEATS, threading.Event()
        threading.Thread(target=self._beat, daemon=True, name="kvexp-pulse").start()

    def stop(self) -> None:
        """Stop at the next beat."""
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(self._every):
            for end in self._ends():
                end.beat()
