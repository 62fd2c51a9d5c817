"""Jobs that submitit started: the driver waits for all of them, and one that fails ends no other.

Hydra's launcher asks each job for its result and stops at the first that has none, while the others go on
unwatched. Here such a job is noted, and the grid ends when its last job has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from kvexp.errors import UserError

Note = Callable[[str, str], None]
"""Takes the overrides of a cell and the one-line reason of its failure."""


class Patient:
    """A job of submitit whose failure is noted instead of raised."""

    def __init__(self, job: Any, overrides: str, note: Note) -> None:
        self._job, self._overrides, self._note = job, overrides, note

    def results(self) -> list[Any]:
        """Wait for the job, and return its results; an empty one, noted, where it failed."""
        from hydra.core.utils import JobReturn, JobStatus
        from submitit.core.utils import FailedJobError

        try:
            results = list(self._job.results())
            failed = next((one for one in results if one.status == JobStatus.FAILED), None)
            if failed is None:
                return results
            reason = _sentence(failed._return_value)  # Hydra raises it for `return_value`
        except FailedJobError as error:
            reason = raised(str(error))
        except Exception:  # cancelled, out of memory, node lost: there is nothing to read
            reason = (
                f"job {self._job.job_id} ended without a result ({self._job.state}): the same command goes on"
                " from the last complete sample"
            )
        self._note(self._overrides, reason)
        empty = JobReturn()
        empty.status, empty.return_value = JobStatus.COMPLETED, None
        return [empty]


def _sentence(error: BaseException) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def raised(text: str) -> str:
    """Return the exception in what submitit tells of a failed job: the last line of its traceback."""
    rule = next((line for line in text.splitlines() if len(line) > 5 and set(line) == {"-"}), None)
    trace = text.split(rule)[1] if rule else text
    lines = [line for line in trace.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if line[:1].strip()), "the job failed")
    name, found, said = last.partition(": ")
    name = name.rpartition(".")[2]
    return said if name == "UserError" else f"{name}{found}{said}"


@contextmanager
def waited_for(note: Note) -> Iterator[None]:
    """Have the jobs that are submitted inside the block waited for to the last."""
    import submitit

    class Executor(submitit.AutoExecutor):
        def map_array(self, fn: Any, *iterable: Any) -> list[Any]:
            jobs = super().map_array(fn, *iterable)
            return [
                Patient(job, " ".join(overrides), note)
                for job, overrides in zip(jobs, iterable[0], strict=True)
            ]

    with mock.patch.object(submitit, "AutoExecutor", Executor):
        yield
