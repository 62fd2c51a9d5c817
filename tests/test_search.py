"""A search: what a run returns, what is refused, and the command that tests the choice."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.search import check_search, chosen, objective_of

RECORD = {"choices": {"task": "intents"}, "metrics": {"accuracy": {"value": 0.5}, "kl": {"value": 0.25}}}


@pytest.mark.parametrize(("name", "value"), [("kl", 0.25), ("intents/accuracy", 0.5)])
def test_the_objective_is_a_metric_of_the_record(name: str, value: float) -> None:
    assert objective_of(RECORD, name) == value


def test_another_name_is_told_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'accuracy'"):
        objective_of(RECORD, "accurazy")


def test_a_search_needs_an_objective_and_stays_off_the_test_split() -> None:
    for objective, split, said in ((None, "validation", "needs objective="), ("kl", "test", "split=test")):
        settings: Any = SimpleNamespace(objective=objective, split=split)
        with pytest.raises(UserError, match=said):
            check_search(settings)
    right: Any = SimpleNamespace(objective="kl", split="validation")
    check_search(right)


def test_the_command_for_the_test_split(tmp_path: Path) -> None:
    command = "python -m kvexp sweep=optuna objective=kl method=asm split=validation hydra.mode=RUN"
    assert chosen(tmp_path, 0, command) == []
    found = {"name": "optuna", "best_params": {"budget": 512, "method.ridge": 0.5}, "best_value": 0.123456}
    (tmp_path / "optimization_results.yaml").write_text(yaml.safe_dump(found))
    first, second = chosen(tmp_path, 0, command)
    assert first == "the search chose budget=512 method.ridge=0.5 (0.1235 on split=validation); on test:"
    words = "sweep=optuna objective=kl method=asm budget=512 method.ridge=0.5 split=test hydra.mode=RUN"
    assert second == f"  python -m kvexp {words}"
    assert chosen(tmp_path, time.time() + 9, command) == []  # of an earlier search


def test_the_objective_changes_no_cell() -> None:
    one, other = (settings_of(["method=full", *more])[0] for more in ([], ["objective=kl"]))
    assert one.cell == other.cell and other.objective == "kl"


DRIVER = """
import json, sys, types
def run(settings):
    return {"choices": {"task": "intents"},
            "metrics": {"accuracy": {"value": 1 - abs(settings.budget.rows - 300) / 1000}}}
sys.modules["kvexp.run"] = types.SimpleNamespace(run=run, finish_grid=lambda cells: None)
from kvexp.cli import main
sys.exit(main(json.loads(sys.argv[1])))
"""


def test_optuna_searches_or_says_what_to_install(tmp_path: Path) -> None:
    words = ["sweep=optuna", "objective=accuracy", "method=truncate", "model=tiny-llama"]
    words += ["hydra.sweeper.n_trials=12", "budget=range(100,501)"]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(words)],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    if find_spec("hydra_plugins.hydra_optuna_sweeper") is None:
        assert done.returncode == 2 and "pip install 'kvexp[optuna]'" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()[-2:]
    budget = int(first.partition("budget=")[2].split()[0])
    assert abs(budget - 300) < 80
    (cell,) = settings_of(shlex.split(second)[3:])
    assert (cell.split, cell.budget.rows, cell.choices["method"]) == ("test", budget, "truncate")
