"""Every method in `conf/` answers a task of labels, from the words of a command to the record of its cell."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kvexp.cli import settings_of
from kvexp.compose import conf_dir
from kvexp.errors import UserError
from kvexp.report.collect import collect
from kvexp.run import run

METHODS = sorted(path.stem for path in (conf_dir() / "method").glob("*.yaml"))
READ_THE_QUESTION = ("agentkvshift_plus", "prophetkv")  # which many queries on one context do not allow
WHOLE = ("full", "full_recompute", "keep_all", "prefix_cache")  # nothing is lost
KEEP_FEWER = {"lazyeviction": "method.recent=8", "triattention_plus": "method.recent=8"}
WORDS = (
    "model=tiny-llama task=intents task.context_tokens=300 task.n_labels=3 task.n_calibration=2 fidelity=true"
    " limit=2 calibration.n=4 calibration.tokens=300 logger=none budget=48"
)


@pytest.mark.parametrize("method", METHODS)
def test_a_cell(method: str, tmp_path: Path) -> None:
    words = [
        *WORDS.split(),
        f"method={method}",
        f"output_dir={tmp_path}",
        *KEEP_FEWER.get(method, "").split(),
    ]
    if method in READ_THE_QUESTION:
        with pytest.raises(UserError, match="chooses by the question before it is asked"):
            settings_of(words)
        return
    [settings] = settings_of(words)
    record = run(settings)
    assert record["status"] == "complete" and record["metrics"]["accuracy"]["n"] == 2
    assert not collect([tmp_path]).problems
    kl = record["fidelity"]["kl"]
    assert kl == pytest.approx(0, abs=1e-6) if method in WHOLE else math.isfinite(kl) and kl > 0
