"""The same grid through submitit on this machine alone: no Slurm is needed for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvexp import status

pytest.importorskip("submitit", reason="pip install 'kvexp[slurm]'")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

GRID = "-m hydra/launcher=submitit_local model=tiny-llama task=intents task.context_tokens=300"
GRID += " task.n_labels=4 task.n_calibration=4 limit=4 logger=none method=truncate budget=2,100,200"


def test_a_grid_on_this_machine(environment, tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvexp", *GRID.split(), f"output_dir={tmp_path / 'out'}"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "budget=2 is smaller than the prompt's header" in done.stderr
    assert done.stderr.endswith("kvexp: 1 of 3 cells failed\n")
    cells, (plan,) = status.survey(tmp_path / "out")
    assert sorted(cell.state for cell in cells) == ["complete", "complete", "failed"]
    assert [cell.folder.split("/")[-2] for cell in plan.cells] == ["b2", "b100", "b200"]
