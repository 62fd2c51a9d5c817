"""Trackers that need no account: Trackio, MLflow on SQLite, and TensorBoard's event files.

All three take the numbers of a record under the keys that W&B has too, and the configuration flat. Samples
stand in the run's own folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from kvexp.errors import UserError
from kvexp.report.loggers import Job, Outcome, flatten, summary


class Local:
    """What the three share; a subclass opens its tracker in `_open` and writes numbers in `_write`."""

    package = ""
    extra = ""

    def __init__(self, project: str = "kvexp") -> None:
        self.project = project

    def start(self, job: Job) -> None:
        """Open the run. Raises UserError when the tracker is not installed."""
        try:
            import_module(self.package)
        except ImportError as error:
            raise UserError(f"pip install 'kvexp[{self.extra}]', or choose logger=none ({error})") from error
        self._open(job, {**flatten(job.config), **flatten(job.choices), "cell": job.cell})

    def metrics(self, record: Mapping[str, Any]) -> None:
        """Log the numbers."""
        self._write({key: value for key, value in summary(record).items() if isinstance(value, int | float)})

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing."""

    def finish(self, status: Outcome, error: str | None = None) -> None:
        """Close the run as complete or failed."""
        raise NotImplementedError

    def _open(self, job: Job, config: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _write(self, numbers: Mapping[str, float]) -> None:
        raise NotImplementedError


class TrackioLogger(Local):
    """One run of Trackio for each cell, named by it, in output_dir/trackio unless TRACKIO_DIR says where.

    A run that failed logs the number `failed`, since Trackio has no state for it.
    """

    package = extra = "trackio"

    def start(self, job: Job) -> None:
        """Open the run; where its files go is read when Trackio is imported."""
        os.environ.setdefault("TRACKIO_DIR", str(job.output_dir / "trackio"))
        super().start(job)

    def finish(self, status: Outcome, error: str | None = None) -> None:
        """Close the run."""
        import trackio

        trackio.log({"failed": int(status != "complete")})
        trackio.finish()

    def _open(self, job: Job, config: Mapping[str, Any]) -> None:
        import trackio

        group = f"{job.choices['task']}/{job.choices['model']}"
        trackio.init(
            project=self.project,
            name=f"{job.name}-{job.cell}",
            group=group,
            config=dict(config),
            resume="allow",
        )

    def _write(self, numbers: Mapping[str, float]) -> None:
        import trackio

        trackio.log(dict(numbers))


class TensorboardLogger(Local):
    """Event files for each cell, through Lightning's logger."""

    package = extra = "tensorboard"
    _logger: Any

    def finish(self, status: Outcome, error: str | None = None) -> None:
        """Close the file; a failed run says why in a text."""
        if error:
            self._logger.experiment.add_text("error", error)
        self._logger.finalize("success" if status == "complete" else "failed")

    def _open(self, job: Job, config: Mapping[str, Any]) -> None:
        from lightning.pytorch.loggers import TensorBoardLogger

        name = Path(str(job.choices["task"]), str(job.choices["model"]))
        self._logger = TensorBoardLogger(
            job.output_dir / "tensorboard", name=str(name), version=f"{job.name}-{job.cell}"
        )
        self._logger.log_hyperparams(dict(config))

    def _write(self, numbers: Mapping[str, float]) -> None:
        self._logger.log_metrics(dict(numbers), step=0)


class MlflowLogger(Local):
    """One run of MLflow for each cell, through Lightning's logger; a cell that goes on finds its run."""

    package = extra = "mlflow"
    _logger: Any

    def finish(self, status: Outcome, error: str | None = None) -> None:
        """Close the run as finished or failed."""
        if error:
            self._logger.experiment.set_tag(self._logger.run_id, "error", error)
        self._logger.finalize("success" if status == "complete" else "failed")

    def _open(self, job: Job, config: Mapping[str, Any]) -> None:
        from lightning.pytorch.loggers import MLFlowLogger

        job.output_dir.mkdir(parents=True, exist_ok=True)
        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{job.output_dir / 'mlflow.db'}"
        self._logger = MLFlowLogger(
            experiment_name=self.project,
            run_name=job.name,
            tracking_uri=place,
            tags={"cell": job.cell},
            artifact_location=str(job.output_dir / "mlflow"),
        )
        client = self._logger.experiment  # makes the experiment
        before = client.search_runs([self._logger.experiment_id], f"tags.cell = '{job.cell}'")
        others = [run.info.run_id for run in before if run.info.run_id != self._logger.run_id]
        if others:
            client.delete_run(self._logger.run_id)
            self._logger._run_id = others[0]
            client.update_run(others[0], status="RUNNING")
        else:
            self._logger.log_hyperparams(dict(config))

    def _write(self, numbers: Mapping[str, float]) -> None:
        self._logger.log_metrics(dict(numbers), step=0)
