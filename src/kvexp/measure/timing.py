"""Wall-clock time by name, true on devices that run asynchronously."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager


def synchronise(device: str) -> None:
    """Wait until `device` ("cpu", "cuda", "cuda:1", "mps") has finished the work it was given."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)
    elif device.startswith("mps"):
        import torch

        torch.mps.synchronize()


class Stopwatch:
    """Adds up the seconds spent in named spans.

        watch = Stopwatch("cuda")
        with watch("encode"):
            ...
        watch.seconds("encode"), watch.count("encode")

    The device is synchronised at both ends of a span, so that a span holds its own work and no other. A span
    that ends in an exception is counted too. Spans may nest under different names; each then holds its whole
    length.
    """

    def __init__(self, device: str = "cpu", clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()
        self._traced: set[str] = set()
        self._lengths: defaultdict[str, list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block under `name`."""
        synchronise(self._device)
        start = self._clock()
        try:
            yield
        finally:
            synchronise(self._device)
            self.add(name, self._clock() - start)

    def add(self, name: str, seconds: float) -> None:
        """Count one span of `seconds` that was measured elsewhere."""
        self._seconds[name] += seconds
        self._counts[name] += 1
        if name in self._traced:
            self._lengths[name].append(seconds)

    def trace(self, name: str) -> AbstractContextManager[None]:
        """Time a block under `name` and keep its own length, for `lengths` and `percentiles`."""
        self._traced.add(name)
        return self(name)

    def lengths(self, name: str) -> Sequence[float]:
        """Return the seconds of each of the blocks traced under `name`, in order; grows as more are."""
        return self._lengths[name]

    def percentiles(self, name: str) -> dict[str, float] | None:
        """Return the median, the 99th percentile and the longest of the blocks traced under `name`."""
        lengths = sorted(self._lengths[name])
        if not lengths:
            return None
        return {
            "p50": lengths[len(lengths) // 2],
            "p99": lengths[min(len(lengths) - 1, math.ceil(0.99 * len(lengths)) - 1)],
            "max": lengths[-1],
        }

    def seconds(self, name: str) -> float | None:
        """Return the total seconds of `name`, or None when it never ran."""
        return self._seconds[name] if name in self._counts else None

    def count(self, name: str) -> int:
        """Return how many spans of `name` there were."""
        return self._counts[name]

    def mean(self, name: str) -> float | None:
        """Return the mean seconds of a span of `name`, or None when it never ran."""
        return self._seconds[name] / self._counts[name] if name in self._counts else None

    def per_second(self, name: str, items: int) -> float | None:
        """Return `items` (tokens, documents) per second of `name`; None when nothing or no time was spent."""
        seconds = self.seconds(name)
        return items / seconds if items and seconds else None

    def totals(self) -> dict[str, float]:
        """Return the seconds of every name, in the order in which the names first ran."""
        return {name: self._seconds[name] for name in self._counts}
