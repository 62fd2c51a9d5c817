"""Runs that are killed again and again end as one that nobody touched (about a minute)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.torture
def test_kills_leave_no_trace() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "torture.py"), "kills=6", "ranks=1"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 kills" in done.stdout
    assert "0 lost, 0 doubled, 0 other_samples, 0 other_memories, 0 leftovers" in done.stdout
