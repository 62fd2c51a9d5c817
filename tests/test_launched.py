"""Jobs of submitit: every one is waited for, and what failed is noted with its reason."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus

from kvexp.errors import UserError
from kvexp.launched import Patient, raised, waited_for

submitit: Any = pytest.importorskip("submitit")

TRACE = """Job (task=0) failed during processing with trace:
----------------------
Traceback (most recent call last):
  File "x.py", line 3, in run
    raise UserError("-- no")
{last}

----------------------
You can check full logs with 'job.stderr(0)' and 'job.stdout(0)'
"""


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("kvexp.errors.UserError: the corpus has 3 tokens", "the corpus has 3 tokens"),
        ("RuntimeError: the sky fell", "RuntimeError: the sky fell"),
        ("torch.cuda.OutOfMemoryError: CUDA: none", "OutOfMemoryError: CUDA: none"),
        ("KeyError", "KeyError"),
    ],
)
def test_the_reason_is_the_last_line_of_the_traceback(last: str, said: str) -> None:
    assert raised(TRACE.format(last=last)) == said


class Job:
    job_id, state = "7_1", "CANCELLED"

    def __init__(self, error: Exception | None, inside: Exception | None = None) -> None:
        self.error = error
        self.result = JobReturn()
        self.result.status = JobStatus.FAILED if inside else JobStatus.COMPLETED
        self.result.return_value = inside or 0.5

    def results(self) -> list[JobReturn]:
        if self.error:
            raise self.error
        return [self.result]


def test_what_failed_is_noted_and_ends_nothing() -> None:
    noted: list[tuple[str, str]] = []

    def note(overrides: str, reason: str) -> None:
        noted.append((overrides, reason))

    failed = submitit.core.utils.FailedJobError(TRACE.format(last="ValueError: x"))
    lost = submitit.core.utils.UncompletedJobError("no output")
    jobs = [
        Job(None),
        Job(failed),
        Job(lost),
        Job(None, UserError("too few")),
        Job(None, RuntimeError("sky")),
    ]
    results = [Patient(job, f"seed={i}", note).results() for i, job in enumerate(jobs)]
    assert [result[0].return_value for result in results] == [0.5, None, None, None, None]
    assert noted[0] == ("seed=1", "ValueError: x")
    assert noted[1][0] == "seed=2" and "job 7_1 ended without a result (CANCELLED)" in noted[1][1]
    assert noted[2:] == [("seed=3", "too few"), ("seed=4", "RuntimeError: sky")]


def test_jobs_are_wrapped_inside_the_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Executor:
        def map_array(self, function: Any, *columns: Any) -> list[Job]:
            return [Job(None) for _ in columns[0]]

    monkeypatch.setattr(submitit, "AutoExecutor", Executor)
    with waited_for(lambda overrides, reason: None):
        jobs = submitit.AutoExecutor().map_array(print, [["seed=1"], ["seed=2"]])
    assert [type(job) for job in jobs] == [Patient, Patient]
    assert jobs[0].results()[0].return_value == 0.5 and submitit.AutoExecutor is Executor
