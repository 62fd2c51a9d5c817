"""A search over knobs: what a run returns to the sweeper, and the command that tests what it chose."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvexp.errors import UserError, suggest

if TYPE_CHECKING:
    from kvexp.schema import Settings

RESULTS = "optimization_results.yaml"  # what Hydra's Optuna sweeper leaves in output_dir
_NOT_OF_THE_CELL = ("split=", "hydra.")


def check_search(settings: Settings) -> None:
    """Refuse a search without an objective, and one that looks at the test split.

    Raises:
        UserError: with what to write.
    """
    if settings.objective is None:
        raise UserError(
            "a search needs objective=METRIC, the number that it goes by: write"
            " objective=accuracy_calibrated, kl or another metric of the task"
        )
    if settings.split == "test":
        raise UserError(
            "a search on split=test would choose by the answers that it is judged by: leave split=validation"
        )


def objective_of(record: Mapping[str, Any], objective: str) -> float:
    """Return the metric `objective` ("accuracy", or "intents/accuracy") of a record.

    Raises:
        UserError: the record has no such metric.
    """
    numbers = {name: metric["value"] for name, metric in record["metrics"].items()}
    name = objective.removeprefix(f"{record['choices']['task']}/")
    if name not in numbers:
        raise UserError(
            f"objective={objective} is no metric of this task{suggest(name, numbers) or '.'}"
            f" It has {', '.join(sorted(numbers))}"
        )
    return float(numbers[name])


def chosen(output_dir: Path, since: float, command: str) -> list[str]:
    """Return the lines that tell what a search chose, and the command that evaluates it on the test split.

    Args:
        output_dir: where the sweeper left its result; one older than `since` (seconds) is of another search.
        since: when this search began.
        command: what runs one cell of it, without the values that were searched.
    """
    path = output_dir / RESULTS
    if not path.exists() or path.stat().st_mtime < since:
        return []
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    best = found.get("best_params")
    if not isinstance(best, Mapping):  # several objectives have no single best
        return []
    values = [f"{key}={value}" for key, value in best.items()]
    fixed = [word for word in shlex.split(command) if not word.startswith(_NOT_OF_THE_CELL)]
    again = shlex.join([*fixed, *values, "split=test", "hydra.mode=RUN"])
    return [
        f"the search chose {' '.join(values)} ({found.get('best_value'):.4g} on split=validation); on test:",
        f"  {again}",
    ]
