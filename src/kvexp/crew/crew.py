"""What the processes of one run ask of each other; a run of one process is a crew of one."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from kvexp.crew.line import Caller, Hub
from kvexp.crew.wire import ENDED, SILENCE, LineLost
from kvexp.errors import UserError

SIGNAL = signal.SIGURG  # nobody else's, and ignored where there is no handler
GRACE = 20.0  # seconds that a blocked main process has to end by itself after a rank was lost


class RankLost(RuntimeError):
    """A process of the crew has gone, and the run cannot be completed."""


class Crew:
    """A process's place among those that work on one cell.

    Every rank calls `broadcast`, `gather` and `barrier` in the same order. Values are plain JSON data.
    """

    rank, world = 0, 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes the record, and all else that stands in one file."""
        return self.rank == 0

    @property
    def processes(self) -> int:
        """How many processes work together."""
        return self.world

    def share(self, count: int) -> range:
        """Return which of `count` equal pieces of work are this rank's."""
        return range(self.rank, count, self.world)

    def broadcast(self, value: Any = None) -> Any:
        """Return the value of rank 0, on every rank."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks in order, on rank 0; nothing elsewhere."""
        return [value]

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self.gather(None)
        self.broadcast(None)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Raise RankLost inside the block as soon as a rank is gone."""
        yield

    def done(self) -> None:
        """End here unless this is rank 0: the part of the others is done."""


ALONE = Crew()


class First(Crew):
    """Rank 0 of several."""

    def __init__(self, world: int, silence: float = SILENCE, host: str | None = None) -> None:
        """`host`: where the others call; None: from anywhere."""
        self.world, self.lost = world, ""
        self._error: type[Exception] = RankLost
        self._reported, self._seen = threading.Event(), threading.Event()
        self._reporting = threading.Lock()
        self._giving_up = threading.Timer(GRACE, self._give_up)
        self._giving_up.daemon = True
        self.hub = Hub(world, self.report, silence, host or "")

    def report(self, who: str, reason: str, user: bool) -> None:
        """Note, from any thread, that a rank is gone, and stop the main process; the first report counts."""
        with self._reporting:
            if self._reported.is_set() or self._seen.is_set():
                return
            self.lost = reason if user else f"{who} is gone ({reason}): the same command goes on from here"
            self._error = UserError if user else RankLost
            self._reported.set()
            self._giving_up.start()
        signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)

    def _give_up(self) -> None:
        if not self._seen.is_set():  # blocked where no signal is looked at, as in a collective on GPUs
            print(f"kvexp: {self.lost}", file=sys.stderr, flush=True)
            os._exit(1)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._reported.is_set() and not self._seen.is_set():
            self._seen.set()
            raise self._error(self.lost)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Raise RankLost inside the block as soon as a rank is gone."""
        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(SIGNAL, self._stop) if main else None
        try:
            yield
        except (RankLost, UserError):
            raise
        except Exception as error:  # a collective may notice before the line does
            if self._reported.wait(1.0):
                raise self._error(self.lost) from error
            raise
        finally:
            self._seen.set()
            if main:
                signal.signal(SIGNAL, before)

    def broadcast(self, value: Any = None) -> Any:
        """Give every rank a value."""
        return self.hub.broadcast(value)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        return self.hub.gather(value)

    def close(self, well: bool = False) -> None:
        """Take leave; unless all is done `well`, ranks that are still at work end."""
        self._seen.set()
        self._giving_up.cancel()
        self.hub.close(well)


class Member(Crew):
    """Another rank; it ends with rank 0."""

    def __init__(self, rank: int, world: int, silence: float, host: str, port: int, token: str) -> None:
        self.rank, self.world, self._done = rank, world, False
        self.line = Caller(host, port, token, rank, self._alone, silence)

    def _alone(self, reason: str, user: bool) -> None:
        if self._done:
            return
        if reason != ENDED:  # else rank 0 has said why
            print(f"kvexp: rank {self.rank} ends: of rank 0 {reason}", file=sys.stderr, flush=True)
        os._exit(1)

    def broadcast(self, value: Any = None) -> Any:
        """Return what rank 0 gives."""
        return self.line.broadcast()

    def gather(self, value: Any) -> list[Any]:
        """Hand a value to rank 0."""
        return self.line.gather(value)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Tell rank 0 why, where the block fails."""
        try:
            yield
        except LineLost:
            raise SystemExit(1) from None
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            user = isinstance(error, UserError)
            self._done = True  # the log gets the whole of it
            self.line.bye(first if user else f"{type(error).__name__}: {first}", user)
            self.line.ended(2 * GRACE)  # a launcher ends rank 0 with this one, and it has a record to write
            raise

    def leave(self) -> None:
        """Say that this rank has done its part."""
        self._done = True
        self.line.bye()

    def done(self) -> None:
        """End: rank 0 goes on alone."""
        self.leave()
        raise SystemExit(0)
