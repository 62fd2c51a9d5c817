"""Which logger is taken, what it is given, and that it never ends a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvexp.errors import UserError
from kvexp.report.csv_logger import CsvLogger
from kvexp.report.loggers import Guarded, Job, NoLogger, flatten, make_logger, summary
from kvexp.report.wandb_logger import WandbLogger


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_SWEEP_ID", "RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def job(tmp_path) -> Job:
    choices = {"method": "asm", "model": "tiny", "task": "intents", "budget": 1024, "seed": 0}
    return Job("0123456789", tmp_path / "cell", tmp_path, choices)


def test_auto_is_none_without_a_key_or_a_sweep():
    assert isinstance(make_logger("auto", project="p").inner, NoLogger)


@pytest.mark.parametrize("variable", ["WANDB_API_KEY", "WANDB_SWEEP_ID"])
def test_auto_is_wandb_with_a_key_or_in_a_sweep(monkeypatch, variable):
    monkeypatch.setenv(variable, "x")
    inner = make_logger("auto", project="p", entity="e", mode=None).inner
    assert isinstance(inner, WandbLogger)
    assert (inner.project, inner.entity, inner.mode) == ("p", "e", None)


def test_an_empty_key_is_no_key(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "")
    assert isinstance(make_logger("auto").inner, NoLogger)


def test_names():
    assert isinstance(make_logger("none").inner, NoLogger)
    assert isinstance(make_logger("csv").inner, CsvLogger)
    assert isinstance(make_logger("wandb").inner, WandbLogger)
    with pytest.raises(UserError, match="logger=wandbb is unknown, did you mean 'wandb'"):
        make_logger("wandbb")


def test_only_rank_0_logs(monkeypatch):
    assert isinstance(make_logger("csv", rank=1).inner, NoLogger)
    monkeypatch.setenv("RANK", "2")
    assert isinstance(make_logger("csv").inner, NoLogger)
    assert isinstance(make_logger("csv", rank=0).inner, CsvLogger)


class Broken:
    """Fails in one verb and notes the others."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.called: list[str] = []

    def __getattr__(self, verb: str):
        def call(*_: object) -> None:
            self.called.append(verb)
            if verb == self.verb:
                raise RuntimeError("no\n  network")

        return call


@pytest.mark.parametrize(
    ("verb", "called"),
    [
        ("start", ["start"]),
        ("metrics", ["start", "metrics", "finish"]),
        ("samples", ["start", "metrics", "samples", "finish"]),
        ("finish", ["start", "metrics", "samples", "finish"]),
    ],
)
def test_a_logger_that_raises_is_told_once_and_closed(job, make_record, verb, called):
    said: list[str] = []
    inner = Broken(verb)
    logger = Guarded(inner, said.append)
    logger.start(job)
    logger.metrics(make_record())
    logger.samples([{"id": "a"}])
    logger.finish("complete")
    assert inner.called == called
    assert said == ["Broken failed and is off for the rest of this run: no network"]


def test_an_interrupt_is_not_swallowed(job):
    class Interrupted(NoLogger):
        def start(self, job: Job) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guarded(Interrupted()).start(job)


def test_the_name_of_a_job(job):
    assert job.name == "asm-intents-b1024-s0"


def test_the_summary_of_a_record(make_record):
    record = make_record(accuracy=0.5, stderr=None)
    record["fidelity"] = {"kl": 0.25, "by_position": {"full": 0.5}}
    assert summary(record) == {
        "budget": 1024,
        "intents/accuracy": 0.5,
        "cache/context_tokens": 4096,
        "cache/entries_nominal": 1024,
        "cache/entries_peak": 1024,
        "cache/entries_mean": 1000.5,
        "cache/bytes_peak": 3 * 2**20,
        "cache/bytes_full": 12 * 2**20,
        "cache/kv_token_equivalents": 1024.0,
        "cache/evicted": 3072,
        "cache/looked_up": 0,
        "cache/reused": 0,
        "cache/recomputed": 0,
        "timing/encode_s": 2.0,
        "timing/decode_tokens_per_s": 50.0,
        "timing/total_s": 9.0,
        "fidelity/kl": 0.25,
        "fidelity/by_position/full": 0.5,
    }
    assert summary(make_record("full", "full"))["budget"] == 4096
    assert summary(make_record("full", "full", error="no memory")) == {
        "timing/encode_s": 2.0,
        "timing/decode_tokens_per_s": 50.0,
        "timing/total_s": 9.0,
    }


def test_flattening():
    assert flatten({"a": {"b": {"c": 1}, "d": [2]}, "e": None}) == {"a.b.c": 1, "a.d": [2], "e": None}


def test_no_logger_writes_nothing(job, make_record):
    logger = make_logger("none")
    logger.start(job)
    logger.metrics(make_record())
    logger.finish("complete")
    assert list(Path(job.output_dir).iterdir()) == []
