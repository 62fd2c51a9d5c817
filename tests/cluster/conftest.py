"""One Slurm for all tests of this folder, and the environment of the processes that they start."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from slurmd import Slurm, missing

ROOT = Path(__file__).parents[2]
NEEDED = "KVEXP_NEED_SLURM"


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """The environment of a user: the tree's own code, one thread, no rank and no tracker's settings."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("WANDB_", "SLURM_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
        kept.pop(name, None)
    paths = os.pathsep.join(str(ROOT / part) for part in ("src", "kernels"))
    return {**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A running cluster; where there is none the tests are skipped, or fail if KVEXP_NEED_SLURM is set."""
    if reason := missing():
        if os.environ.get(NEEDED):
            pytest.fail(f"{NEEDED} is set, and there is no Slurm: {reason}")
        pytest.skip(f"NOTHING WAS TESTED ON SLURM: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    cluster = Slurm(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
