"""Progress of long work: a bar with rate and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
LINE_EVERY = 10.0  # seconds between plain lines


def track(items: Iterable[T], what: str, total: int | None = None, unit: str = "it") -> Iterator[T]:
    """Yield the items and show how far the work is, on standard error."""
    if total is None:
        total = len(items) if hasattr(items, "__len__") else None  # type: ignore[arg-type]
    if sys.stderr.isatty():
        yield from _bar(items, what, total, unit)
    else:
        yield from _lines(items, what, total, unit)


def _bar(items: Iterable[T], what: str, total: int | None, unit: str) -> Iterator[T]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total, rate="")
        start = time.perf_counter()
        for done, item in enumerate(items, 1):
            yield item
            rate = done / max(time.perf_counter() - start, 1e-9)
            progress.update(task, completed=done, rate=f"{rate:.2f} {unit}/s")


def _lines(items: Iterable[T], what: str, total: int | None, unit: str) -> Iterator[T]:
    start = last = time.perf_counter()
    done = told = 0
    begun = threading.Timer(LINE_EVERY, _say_begun, (what, total, unit))  # where the first item takes long
    begun.daemon = True
    begun.start()
    try:
        for done, item in enumerate(items, 1):
            yield item
            begun.cancel()
            now = time.perf_counter()
            if now - last >= LINE_EVERY:
                last, told = now, done
                _say(what, done, total, now - start, unit)
    finally:
        begun.cancel()
    spent = time.perf_counter() - start
    if done > told and spent >= LINE_EVERY:
        _say(what, done, total, spent, unit)


def _say_begun(what: str, total: int | None, unit: str) -> None:
    print(f"{what}: {_of(0, total)} {unit}", file=sys.stderr, flush=True)


def _say(what: str, done: int, total: int | None, spent: float, unit: str) -> None:
    rate = done / max(spent, 1e-9)
    left = f", {(total - done) / rate:.0f} s left" if total else ""
    print(f"{what}: {_of(done, total)} ({rate:.2f} {unit}/s{left})", file=sys.stderr, flush=True)


def _of(done: int, total: int | None) -> str:
    return f"{done}/{total}" if total else str(done)
