"""How long each step of decoding took, and at which of them rows left: the file `latency.json` of a run.

    {"batches": [{"samples": ["0", "1"], "steps": 300, "step_ms": [21.3, ...], "pruned": [127, 255]}, ...]}

One entry is one batch, whose samples decode together; step n reads the token n of an answer, from 0. `pruned`
names the steps at which rows left the cache of a sequence that had not ended. Of a run the first `BATCHES`
batches that decode are kept, of each the first `STEPS` steps; `steps` says how many there were.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvexp.files import write_atomic
from kvexp.measure.timing import Stopwatch

BATCHES = 4
STEPS = 2048


class Steps:
    """Times the steps of one batch, under the name "step", and notes those at which rows left.

        steps = Steps(watch, batch.cache.counters)
        batch.generate(64, stopped, stepped=steps)

    `counters` are those that the batch's caches share.
    """

    def __init__(self, watch: Stopwatch, counters: Mapping[str, int]) -> None:
        self._watch, self._counters = watch, counters
        self._before = len(watch.lengths("step"))
        self.pruned: list[int] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Time the block as the next step."""
        number = len(self._watch.lengths("step")) - self._before
        gone = self._counters.get("evicted", 0)
        with self._watch.trace("step"):
            yield
        if self._counters.get("evicted", 0) > gone:
            self.pruned.append(number)

    @property
    def seconds(self) -> Sequence[float]:
        """The length of each step so far."""
        return self._watch.lengths("step")[self._before :]


class LatencyFile:
    """`latency.json`, which grows batch by batch and is always whole; a run that goes on keeps what is there.

    A file that cannot be read is begun anew.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._full = path, False

    def add(self, samples: Sequence[str], steps: Steps) -> None:
        """Keep the steps of a batch, unless there were none, or enough batches or this one are there."""
        seconds = steps.seconds
        if not seconds or self._full:
            return
        kept = self._batches()
        self._full = len(kept) >= BATCHES
        if self._full or any(one.get("samples") == list(samples) for one in kept):
            return
        entry = {
            "samples": list(samples),
            "steps": len(seconds),
            "step_ms": [round(1000 * length, 3) for length in seconds[:STEPS]],
            "pruned": [number for number in steps.pruned if number < STEPS],
        }
        text = json.dumps({"batches": [*kept, entry]}, separators=(",", ":"))
        write_atomic(self.path, text.encode() + b"\n")

    def _batches(self) -> list[dict[str, Any]]:
        try:
            found = json.loads(self.path.read_bytes())["batches"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return []
        whole = isinstance(found, list) and all(isinstance(one, dict) for one in found)
        return found if whole else []
