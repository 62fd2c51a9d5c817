"""Weights & Biases: one run for each cell, offline where there is no key."""

from __future__ import annotations

import json
import netrc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from kvexp.errors import UserError
from kvexp.report.loggers import Job, Outcome, flatten, summary
from kvexp.specs import slug


class WandbLogger:
    """Logs to one W&B run whose id is the cell, so that a run that goes on after a kill goes on there too.

    `group` is the task and model unless given, so that seeds, methods and budgets stand together. `artifact`
    also logs the calibration artefact that the run used. In a sweep the agent decides project, entity and id.
    """

    def __init__(
        self,
        project: str = "kvexp",
        entity: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        group: str | None = None,
        artifact: bool = True,
    ) -> None:
        self.project = project
        self.entity = entity
        self.mode = mode
        self.group = group
        self.artifact = artifact
        self._run: Any = None
        self._job: Job | None = None
        self._summary: dict[str, Any] = {}

    def start(self, job: Job) -> None:
        """Open the run. Raises UserError when wandb is not installed, and wandb's errors."""
        try:
            import wandb
        except ImportError as error:
            raise UserError("wandb is not installed: pip install wandb, or choose logger=none") from error
        choices, self._job = job.choices, job
        in_sweep = bool(os.environ.get("WANDB_SWEEP_ID"))
        mode: Any = os.environ.get("WANDB_MODE") or self.mode or default_mode()
        self._summary = {}
        self._run = wandb.init(
            project=None if in_sweep else os.environ.get("WANDB_PROJECT") or self.project,
            entity=None if in_sweep else os.environ.get("WANDB_ENTITY") or self.entity,
            id=None if in_sweep else job.cell,
            mode=mode,
            resume="allow",
            reinit="finish_previous",
            name=job.name,
            group=self.group or f"{choices['task']}/{choices['model']}",
            job_type="evaluate",
            tags=[choices["method"], choices["model"], choices["task"]],
            dir=str(job.folder),
            config={**flatten(job.config), **flatten(choices)},
        )

    def metrics(self, record: Mapping[str, Any]) -> None:
        """Log the numbers, each metric with its direction; they also become the run's summary."""
        task = record["choices"]["task"]
        for name, metric in record["metrics"].items():
            self._run.define_metric(f"{task}/{name}", summary="max" if metric["higher_is_better"] else "min")
        self._summary = summary(record)
        self._run.log(self._summary)
        if self.artifact:
            self._log_memory()

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log the samples as one table; nested values become JSON text."""
        import wandb

        if not rows:
            return
        columns: list[str | int] = list(dict.fromkeys(key for row in rows for key in row))
        data = [[_cell(row.get(str(key))) for key in columns] for row in rows]
        self._run.log({"samples": wandb.Table(columns=columns, data=data, allow_mixed_types=True)})

    def _log_memory(self) -> None:
        """Log the calibration artefact that memory.json points to; W&B keeps equal files once.

        Its alias is the fingerprint under which the store has it, and its metadata the manifest.
        """
        import wandb

        assert self._job is not None
        pointer = self._job.folder / "memory.json"
        if not pointer.exists():
            return
        memory = json.loads(pointer.read_bytes())
        folder = Path(memory["folder"])
        choices = self._job.choices
        words = (choices["method"], choices["model"], choices.get("calibration", "traces"))
        name = slug("-".join(map(str, words)))
        artefact = wandb.Artifact(name, type="memory", metadata=memory["manifest"])
        for file in sorted(folder.iterdir()):
            if file.is_file() and not file.name.startswith("."):  # not the store's lock
                artefact.add_file(str(file), skip_cache=True, policy="immutable")
        self._run.log_artifact(artefact, aliases=[folder.name.rpartition("-")[2]])

    def finish(self, status: Outcome, error: str | None = None) -> None:
        """Close the run: with exit code 0 when complete, else 1, which W&B shows as failed.

        "preempted" tells a sweep's server to queue the run again.
        """
        if status == "preempted":
            self._run.mark_preempting()
        # A defined direction files the value under `<key>.max`; the plain key is written last so that it
        # stays.
        self._run.summary.update({**self._summary, "status": status, **({"error": error} if error else {})})
        self._run.finish(exit_code=0 if status == "complete" else 1)
        self._run = None


def default_mode() -> str | None:
    """Return "offline" without a key; with one, or in a sweep, None, which leaves the choice to wandb."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_SWEEP_ID") or _logged_in():
        return None
    return "offline"


def _logged_in() -> bool:
    """Whether `wandb login` left a key in the user's netrc file."""
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC") or None).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | tuple) else value
