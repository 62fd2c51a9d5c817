"""Times of sides that take turns in one process."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvexp.errors import UserError
from kvexp.files import check_writable, write_atomic


def clock() -> float:
    """Seconds of this process with one thread on a CPU, else of the wall."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    single = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    return time.process_time() if single else time.perf_counter()


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that `run` took, and what it returned."""
    start = clock()
    result = run()
    return clock() - start, result


def spread(values: Sequence[float]) -> list[float]:
    """Median, least and most."""
    return [statistics.median(values), min(values), max(values)]


def taken(sides: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Run all sides in turn, once each to warm up; return the seconds that each block says it took."""
    for run in sides.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            seconds[name].append(run())
    return seconds


def folder_of(output_dir: Path, part: str) -> Path:
    """Make OUTPUT_DIR/bench/PART and return it; call it before measuring.

    Raises UserError where no file can be written there.
    """
    folder = output_dir / "bench" / part
    try:
        check_writable(folder)
    except OSError as error:
        raise UserError(
            f"output_dir={output_dir} cannot be written to ({error.strerror}): choose another"
        ) from error
    return folder


def written(settings: Any, part: str, report: dict[str, Any]) -> None:
    """Write what a part found to OUTPUT_DIR/bench/PART/MODEL.json."""
    path = folder_of(settings.output_dir, part) / f"{settings.model.label}.json"
    write_atomic(path, (json.dumps(report, indent=2) + "\n").encode())
