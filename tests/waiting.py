"""Waiting for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(what: Callable[[], Any], seconds: float = 120) -> None:
    """Wait until `what()` is true; an AssertionError when it is not within `seconds`."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"not so after {seconds} s"
        time.sleep(0.005)
