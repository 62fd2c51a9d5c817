"""Several ranks as threads of one process; one of them computes at a time, since they share a model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kvexp.crew.crew import Crew


class Seat(Crew):
    """One rank; where ranks meet, another may go on."""

    def __init__(self, rank: int, world: int, shared: dict[Any, Any]) -> None:
        self.rank, self.world, self.shared = rank, world, shared

    def _meet(self) -> None:
        self.shared["lock"].release()
        try:
            self.shared["barrier"].wait(60)
        finally:
            self.shared["lock"].acquire()

    def broadcast(self, value: Any = None) -> Any:
        if self.first:
            self.shared["value"] = value
        self._meet()
        found = self.shared["value"]
        self._meet()
        return found

    def gather(self, value: Any) -> list[Any]:
        self.shared[self.rank] = value
        self._meet()
        found = [self.shared[rank] for rank in range(self.world)] if self.first else []
        self._meet()
        return found

    def done(self) -> None:
        if not self.first:
            raise SystemExit(0)


def together(world: int, work: Callable[[Crew], Any]) -> list[Any]:
    """Run `work` on each rank; return what each gave (None after SystemExit), or raise what was raised."""
    shared: dict[Any, Any] = {"lock": threading.Lock(), "barrier": threading.Barrier(world)}
    found: list[Any] = [None] * world
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        with shared["lock"]:
            try:
                found[rank] = work(Seat(rank, world, shared))
            except SystemExit:
                pass
            except threading.BrokenBarrierError as error:
                errors.append(error)
            except BaseException as error:
                errors.insert(0, error)
                shared["barrier"].abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]
    return found
