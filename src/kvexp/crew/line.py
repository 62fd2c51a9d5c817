"""A line from every process of a crew to the first one: small messages as JSON, and word of a death at once.

When a process dies, whatever killed it, its kernel closes the line, and the other end knows. A machine that
goes without closing it is noticed by TCP's keepalive. Waiting on the line has no time limit: as long as it
stands, the other end is alive, and may be busy for hours.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # a minute without a sign of life
JOIN_SECONDS = 600  # processes of a crew start together
HELLO_SECONDS = 10  # until a process that calls has said who it is


class LineLost(ConnectionError):
    """The other end of a line has gone."""


class _End:
    """One end of a connection: whole messages out and in."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.connection, self._lines = connection, connection.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise LineLost("the line is down") from error

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, None at the end of the line."""
        try:
            row = self._lines.readline()
            message = json.loads(row) if row.endswith(b"\n") else None
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self.connection.close()


class _Inbox:
    """Messages from one end, in order; the thread that reads them tells of its end."""

    def __init__(self, end: _End, ended: Callable[[str, bool], None]) -> None:
        self.end, self._ended = end, ended
        self._messages: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._over = False
        threading.Thread(target=self._read, daemon=True, name="kvexp-line").start()

    def take(self) -> dict[str, Any]:
        """Wait for a message; LineLost when none can come any more."""
        with self._news:
            while not self._messages and not self._over:
                self._news.wait()
            if not self._messages:
                raise LineLost("the line has ended")
            return self._messages.pop(0)

    def _read(self) -> None:
        reason, users = "it ended without a word", False
        while (message := self.end.receive()) is not None:
            if "bye" in message:  # its reason, or None for a process that has done its part
                reason, users = message["bye"], message["user"]
                break
            with self._news:
                self._messages.append(message)
                self._news.notify_all()
        if reason is not None:
            self._ended(reason, users)
        with self._news:
            self._over = True
            self._news.notify_all()


class Hub:
    """The end of rank 0: a line to each other rank.

    `lost(who, reason, user)` is called, in another thread, when one ends without having done its part;
    `user`: because of what the user wrote.
    """

    def __init__(self, world: int, lost: Callable[[str, str, bool], None]) -> None:
        self.world, self._lost = world, lost
        self._server = socket.create_server(("", 0))
        self._server.settimeout(JOIN_SECONDS)
        self._token = secrets.token_hex(16)
        self._inboxes: dict[int, _Inbox] = {}

    @property
    def address(self) -> tuple[int, str]:
        """The port, and the word that lets a process in."""
        return self._server.getsockname()[1], self._token

    def wait(self) -> None:
        """Wait until every rank has called."""
        while len(self._inboxes) < self.world - 1:
            try:
                connection = self._server.accept()[0]
            except TimeoutError as error:
                here = len(self._inboxes) + 1
                raise LineLost(f"{here} of {self.world} processes came within {JOIN_SECONDS} s") from error
            connection.settimeout(HELLO_SECONDS)
            end = _End(connection)
            hello = end.receive() or {}
            if hello.get("token") != self._token:
                end.close()
                continue
            connection.settimeout(None)
            who = f"rank {hello['rank']} (process {hello['pid']} on {hello['host']})"
            self._inboxes[int(hello["rank"])] = _Inbox(end, partial(self._lost, who))
        self._server.close()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks in order, this one's first."""
        return [value, *(self._inboxes[rank].take()["value"] for rank in range(1, self.world))]

    def broadcast(self, value: Any) -> Any:
        """Give every rank a value."""
        for inbox in self._inboxes.values():
            inbox.end.send({"value": value})
        return value

    def close(self) -> None:
        """Hang up: the others end, if they have not."""
        self._server.close()
        for inbox in self._inboxes.values():
            inbox.end.close()


class Caller:
    """The end of another rank; `lost` is called when rank 0 is gone."""

    def __init__(self, host: str, port: int, token: str, rank: int, lost: Callable[..., None]) -> None:
        connection = socket.create_connection((host, port), JOIN_SECONDS)
        connection.settimeout(None)
        self._end = _End(connection)
        self._end.send({"token": token, "rank": rank, "pid": os.getpid(), "host": socket.gethostname()})
        self._inbox = _Inbox(self._end, lost)

    def gather(self, value: Any) -> list[Any]:
        """Hand a value to rank 0; the list is there alone."""
        self._end.send({"value": value})
        return []

    def broadcast(self, value: Any = None) -> Any:
        """Return what rank 0 gives."""
        return self._inbox.take()["value"]

    def bye(self, reason: str | None = None, user: bool = False) -> None:
        """Say that this rank's part is done, or why it cannot be."""
        with contextlib.suppress(LineLost):
            self._end.send({"bye": reason, "user": user})
