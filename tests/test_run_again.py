"""The same cell again: done, interrupted, killed, or started many times at once."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cells import BATCHES, cell, samples_of, words
from kvexp import model
from kvexp.errors import UserError
from kvexp.evaluation import labels
from kvexp.report.folder import RunFolder
from kvexp.run import run
from waiting import until

ATTEMPTS, STARTS = 3, 8


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The samples of a cell that nobody interrupted."""
    settings = cell(tmp_path_factory.mktemp("undisturbed"))
    run(settings)
    return samples_of(settings)


def refuse(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("a complete cell loads nothing")


def test_a_complete_cell_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = cell(tmp_path)
    record, samples = run(settings), samples_of(settings)
    with monkeypatch.context() as patch:
        for name in ("load", "load_once"):
            patch.setattr(model, name, refuse)
        assert run(settings) == record
    assert samples_of(settings) == samples
    (settings.run_dir / ".lock").unlink()
    with monkeypatch.context() as patch:  # a folder that is read-only
        patch.setattr(os, "access", lambda path, mode: False)
        assert run(settings) == record
    assert not (settings.run_dir / ".lock").exists()
    anew = run(cell(tmp_path, "resume=false"))
    assert anew["status"] == "complete" and samples_of(settings) == samples
    assert (settings.run_dir / "old-1/samples.jsonl").read_bytes() == samples


@pytest.fixture(scope="module")
def as_scored(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The samples of a whole run as they are appended, before they are put into the order of documents."""
    settings = cell(tmp_path_factory.mktemp("scored"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "settle", lambda self, order: None)
        run(settings)
    return samples_of(settings)


def test_samples_are_put_into_document_order(undisturbed: bytes, as_scored: bytes) -> None:
    assert undisturbed != as_scored and sorted(undisturbed.splitlines()) == sorted(as_scored.splitlines())
    rows = [json.loads(row)["sample"] for row in undisturbed.splitlines()]
    assert rows == list(range(len(rows)))


@pytest.mark.parametrize("done", range(BATCHES + 1))
def test_a_run_goes_on_from_any_batch(
    done: int, undisturbed: bytes, as_scored: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from after the last one, when only order and record are missing; a torn line is written again."""
    settings, left = cell(tmp_path), [done]
    append = RunFolder.append

    def interrupted(self: RunFolder, batch: Any) -> None:
        if left[0] == 0:
            raise KeyboardInterrupt
        append(self, batch)
        left[0] -= 1
        if left[0] == 0 and done == BATCHES:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(settings)
    assert not (settings.run_dir / "record.json").exists()
    kept = samples_of(settings) if done else b""
    assert as_scored.startswith(kept) and kept.count(b"\n") == 4 * done
    if done < BATCHES:
        (settings.run_dir / "samples.jsonl").write_bytes(as_scored[: len(kept) + 700])
    record = run(settings)
    assert samples_of(settings) == undisturbed
    assert record["status"] == "complete" and record["cache"]["looked_up"] > 0
    assert record["metrics"]["accuracy"]["n"] == 12


def test_a_failed_cell_tells_why_and_goes_on(
    undisturbed: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, score, calls = cell(tmp_path), labels.LabelEvaluation.score, []

    def failing(self: Any, documents: Any) -> Any:
        calls.append(documents)
        if len(calls) == 2:
            raise RuntimeError("the sky fell\nin two lines")
        return score(self, documents)

    with monkeypatch.context() as patch:
        patch.setattr(labels.LabelEvaluation, "score", failing)
        with pytest.raises(RuntimeError, match="the sky fell"):
            run(settings)
    record = json.loads((settings.run_dir / "record.json").read_text())
    assert (record["status"], record["error"]) == ("failed", "the sky fell")
    assert record["provenance"]["command"] == settings.command
    assert samples_of(settings).count(b"\n") == 4
    assert run(settings)["status"] == "complete" and samples_of(settings) == undisturbed


def write_questions(folder: Path, word: str) -> None:
    """A small set in the format of trec."""
    kinds = {"HUM": "who", "LOC": "where", "NUM": "how many"}
    for split, count in (("train", 60), ("test", 4)):
        (folder / "trec").mkdir(parents=True, exist_ok=True)
        with gzip.open(folder / f"trec/{split}.jsonl.gz", "wt", encoding="utf-8") as file:
            for i in range(count):
                for kind, ask in kinds.items():
                    row = {"text": f"{ask} {word} {split} {i} ?", "coarse": kind, "fine": f"{kind}:x"}
                    file.write(json.dumps(row) + "\n")


def test_changed_data_are_refused_and_run_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    write_questions(data, "is")
    chosen = dict(
        word.split("=", 1) for word in words(tmp_path, "task=trec", "method=full", f"data_dir={data}")
    )
    chosen |= {"task.labels": "coarse", "task.n_validation": "2", "task.context_tokens": "900"}
    chosen["task.n_labels"] = "3"
    more = [f"{key}={value}" for key, value in chosen.items()]
    settings = cell(tmp_path, *more)
    with monkeypatch.context() as patch:
        patch.setattr(labels, "label_metrics", refuse)
        with pytest.raises(AssertionError):
            run(settings)
    before = samples_of(settings)
    write_questions(data, "was")
    with pytest.raises(UserError, match=r"data_sha256 changed since this run was interrupted .*resume=false"):
        run(settings)
    assert samples_of(settings) == before
    record = run(cell(tmp_path, *more, "resume=false"))
    assert record["status"] == "complete" and samples_of(settings) != before
    assert run(settings) == record
    write_questions(data, "is")
    with pytest.raises(UserError, match=r"complete, but its data changed since .*resume=false"):
        run(settings)
    shutil.rmtree(data / "trec")  # nothing to compare with
    assert run(settings) == record


STARTER = """
import json, os, signal, sys
import kvexp.cli, kvexp.run, lm_eval.tasks
print("ready", flush=True)
for line in sys.stdin:
    verb, *words = json.loads(line)
    if verb == "wait":
        print(os.waitstatus_to_exitcode(os.waitpid(words[0], 0)[1]), flush=True)
        continue
    child = os.fork()
    if child == 0:
        log = os.open(verb, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1), os.dup2(log, 2)
        os._exit(kvexp.cli.main(words))
    print(child, flush=True)
"""


class Starter:
    """Starts command lines as processes of their own, forked from one that has imported everything."""

    def __init__(self, log: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.log = log
        self.process: Any = subprocess.Popen([sys.executable, "-c", STARTER], env=environment, **pipes)
        assert self.process.stdout.readline() == "ready\n"

    def start(self, line: list[str]) -> int:
        """Start a command line and return the process id."""
        return self._ask(str(self.log), *line)

    def wait(self, process: int) -> int:
        """Wait for a process to end and return its exit code, negative for a signal."""
        return self._ask("wait", process)

    def _ask(self, *words: Any) -> int:
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """Set up once for all tests here (about 6 s: imports)."""
    made = Starter(tmp_path_factory.mktemp("starter") / "log.txt")
    yield made
    made.process.stdin.close()
    made.process.wait()


def test_a_killed_run_completes_with_the_same_samples(
    starter: Starter, undisturbed: bytes, tmp_path: Path
) -> None:
    """Killed after random numbers of samples; the last start is a command of its own (about 8 s)."""
    settings, ends, rng = cell(tmp_path), [], random.SystemRandom()
    line = words(tmp_path, "batch_size=1")  # one sample at a time
    samples, n = settings.run_dir / "samples.jsonl", undisturbed.count(b"\n")
    for written in sorted(rng.sample(range(n - 1), ATTEMPTS)):
        process = starter.start(line)
        time.sleep(rng.uniform(0, 0.2))
        until(lambda least=written: samples.is_file() and samples.read_bytes().count(b"\n") >= least)
        os.kill(process, signal.SIGKILL)  # not yet waited for, so the number is still its own
        ends.append(starter.wait(process))
    assert -signal.SIGKILL in ends, starter.log.read_text()
    done = subprocess.run([sys.executable, "-m", "kvexp", *line], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert samples_of(settings) == undisturbed
    assert json.loads((settings.run_dir / "record.json").read_text())["status"] == "complete"
    known = {".lock", "config.yaml", "inputs.json", "log.txt", "memory.json", "record.json", "samples.jsonl"}
    assert {path.name for path in settings.run_dir.iterdir()} == known


def test_many_starts_of_one_cell_at_once_do_no_harm(
    starter: Starter, undisturbed: bytes, tmp_path: Path
) -> None:
    line, settings = words(tmp_path), cell(tmp_path)
    processes = [starter.start(line) for _ in range(STARTS)]
    assert [starter.wait(process) for process in processes] == [0] * STARTS, starter.log.read_text()
    assert samples_of(settings) == undisturbed
    assert len(list(tmp_path.rglob("record.json"))) == len(list(tmp_path.rglob("samples.jsonl"))) == 1
    assert len(list((tmp_path / "store").glob("asm-*"))) == 1
    log = (settings.run_dir / "log.txt").read_text()
    assert log.count("this cell is complete") == STARTS - 1
