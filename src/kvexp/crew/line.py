"""A line from every process of a crew to the first one: small messages, and word of a death at once.

When a process dies, whatever killed it, its kernel closes the line, and the other end knows. One that is
stopped, or whose machine goes without closing the line, falls silent, and is given up after a time. Else
waiting on the line has no limit: the other end is alive, and may be busy for hours.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from kvexp.crew.wire import SILENCE, End, Inbox, LineLost, Pulse

JOIN_SECONDS = 600  # processes of a crew start together
HELLO_SECONDS, HELLO_BYTES = 10, 2000  # for a process that calls to say who it is


class Hub:
    """The end of rank 0: a line to each other rank.

    `lost(who, reason, user)` is called, in another thread, when one ends without having done its part, or is
    silent for `silence` seconds; `user`: because of what the user wrote. `host`: where to be called; empty on
    all networks of the machine.
    """

    def __init__(
        self, world: int, lost: Callable[[str, str, bool], None], silence: float = SILENCE, host: str = ""
    ) -> None:
        self.world, self._lost, self._silence = world, lost, silence
        self._server = socket.create_server((host, 0))
        self._token = secrets.token_hex(16)
        self._inboxes: dict[int, Inbox] = {}
        self._pulse = Pulse(lambda: [inbox.end for inbox in list(self._inboxes.values())], silence)

    @property
    def address(self) -> tuple[int, str]:
        """The port, and the word that lets a process in."""
        return self._server.getsockname()[1], self._token

    def wait(self) -> None:
        """Wait until every rank has called."""
        end = time.monotonic() + JOIN_SECONDS
        while len(self._inboxes) < self.world - 1:
            self._server.settimeout(max(0.01, end - time.monotonic()))
            try:
                connection = self._server.accept()[0]
            except TimeoutError as error:
                here = len(self._inboxes) + 1
                raise LineLost(f"{here} of {self.world} processes came within {JOIN_SECONDS} s") from error
            self._let_in(End(connection, self._silence))
        self._server.close()

    def _let_in(self, end: End) -> None:
        """Keep a line to a rank that is missing; whoever else calls is left."""
        try:
            hello = end.receive(HELLO_BYTES, HELLO_SECONDS) or {}
        except LineLost:
            hello = {}
        rank, token = hello.get("rank"), str(hello.get("token")).encode(errors="replace")
        known = secrets.compare_digest(token, self._token.encode())
        if not (known and isinstance(rank, int) and 0 < rank < self.world and rank not in self._inboxes):
            end.close()
            return
        who = f"rank {rank} (process {hello.get('pid')} on {hello.get('host')})"
        self._inboxes[rank] = Inbox(end, partial(self._lost, who))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks in order, this one's first."""
        return [value, *(self._inboxes[rank].take()["value"] for rank in range(1, self.world))]

    def broadcast(self, value: Any) -> Any:
        """Give every rank a value."""
        for inbox in self._inboxes.values():
            inbox.end.send({"value": value})
        return value

    def close(self, well: bool = False) -> None:
        """Hang up. Where all is done `well`, the others end by themselves, else at once."""
        self._pulse.stop()
        self._server.close()
        for inbox in self._inboxes.values():
            if well:
                with contextlib.suppress(LineLost):
                    inbox.end.send({"bye": None, "user": False})
            inbox.end.hang_up()


class Caller:
    """The end of another rank; `lost(reason, user)` is called when rank 0 is gone, or silent."""

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        rank: int,
        lost: Callable[[str, bool], None],
        silence: float = SILENCE,
    ) -> None:
        self._end = End(socket.create_connection((host, port), JOIN_SECONDS), silence)
        self._end.send({"token": token, "rank": rank, "pid": os.getpid(), "host": socket.gethostname()})
        self._inbox = Inbox(self._end, lost)
        self._pulse = Pulse(lambda: [self._end], silence)

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

    def ended(self, seconds: float) -> bool:
        """Wait until rank 0 has hung up, so long at most, and return whether it has."""
        return self._inbox.ended(seconds)

    def close(self) -> None:
        """Hang up."""
        self._pulse.stop()
        self._end.hang_up()
