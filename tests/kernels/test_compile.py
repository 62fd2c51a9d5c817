"""Kernels compile for GPUs that are not here: they fit, nothing spills, tiles meet on tensor cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "compile_kernels.py"


def compiled(tmp_path: Path, *words: str) -> list[dict]:
    """Run the script where Triton compiles, and return its rows."""
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, str(SCRIPT), *words, f"json={tmp_path / 'rows.json'}"]
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(ran.stdout.splitlines()) == 2 + len(rows)
    return rows


def test_one_kernel(tmp_path):
    rows = compiled(tmp_path, "lookup_merge", "sm=90", "dtype=bf16")
    assert {row["kernel"] for row in rows} == {"_scan", "_fetch", "_choose", "_scan_cell"}
    scan = next(row for row in rows if row["kernel"] == "_scan")
    assert scan["tensor_core_instructions"] > 0 and 0 < scan["registers"] <= 168
    assert all(row["stack"] == 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("head", [64, 128])
def test_every_kernel_on_both_architectures(tmp_path, head):
    rows = compiled(tmp_path, f"head={head}")
    assert {(row["sm"], row["dtype"]) for row in rows} == {(s, d) for s in (80, 90) for d in ("bf16", "fp32")}
    assert all(row["stack"] == 0 for row in rows)


@pytest.mark.slow
def test_wide_heads(tmp_path):
    compiled(tmp_path, "head=256", "dtype=bf16")
