"""Kill a run again and again, and see that nothing is lost, nothing is there twice, and no byte differs.

    python scripts/torture.py kills=50 ranks=4 seed=0 [words of a command line ...]

A cell is run once undisturbed. The same cell, in a folder of its own, is then started and killed at random
moments of calibration and evaluation, by SIGKILL, SIGTERM or SIGUSR2, until it is complete; then another
round begins, up to `kills` kills (a run that ends before its signal is no kill). `ranks` further kills hit
runs on two processes, rank 0 or rank 1. In the end the memory and the samples of every round are those of the
undisturbed run. Exit code 0 if so, else 1.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json

import lightning  # noqa: F401  (what a run imports is imported once, for all the runs that are forked)
import lm_eval.tasks  # noqa: F401
import torch

import kvexp.calibration.module
import kvexp.run  # noqa: F401
from kvexp import cli

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR2)
WORDS = (
    "model=tiny-llama task=intents method=asm budget=64 logger=none task.context_tokens=700 task.n_labels=4 "
    "task.n_calibration=6 calibration.n=120 calibration.batch_size=2 limit=40 batch_size=1"
).split()
TWO = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2")
SOONEST, LATEST = 0.05, 0.6  # of the undisturbed time, when a signal comes


@dataclass
class Torture:
    """The rounds of one cell."""

    words: list[str]
    home: Path
    draw: random.Random
    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    round: int = 0

    @property
    def folder(self) -> Path:
        """Where the present round works; round 0 is the undisturbed run."""
        return self.home / f"round-{self.round}"

    def start(self, *more: str) -> int:
        """Start the command line in a process forked from this one; its output goes to a log."""
        words = [*self.words, f"output_dir={self.folder}", *more]
        child = os.fork()
        if child == 0:
            log = os.open(self.home / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1), os.dup2(log, 2)
            os._exit(cli.main(words))
        return child

    def undisturbed(self) -> None:
        """Run once without a kill."""
        begun = time.monotonic()
        code = os.waitstatus_to_exitcode(os.waitpid(self.start(), 0)[1])
        if code:
            raise SystemExit(f"the undisturbed run failed ({code}):\n{(self.home / 'log.txt').read_text()}")
        self.seconds = time.monotonic() - begun

    def phase(self) -> str:
        """Say how far the present round has come."""
        if not list(self.folder.glob("store/*/manifest.json")):
            return "calibration"
        return "evaluation" if not self.records() else "complete"

    def records(self) -> list[Path]:
        """Return the records of complete runs in this round."""
        found = self.folder.rglob("record.json")
        return [path for path in found if json.loads(path.read_bytes())["status"] == "complete"]

    def kill(self, started: int, victim: int, delay: float) -> None:
        """Wait, send a signal, and count it where it ended the run."""
        until = time.monotonic() + delay
        while time.monotonic() < until:
            done, status = os.waitpid(started, os.WNOHANG)
            if done:
                self.ended(os.waitstatus_to_exitcode(status), "")
                return
            time.sleep(0.005)
        phase, number = self.phase(), self.draw.choice(SIGNALS)
        try:
            os.kill(victim, number)
        except ProcessLookupError:  # of rank 1, which has done its part
            number = None
        code = os.waitstatus_to_exitcode(os.waitpid(started, 0)[1])
        self.ended(code, f"{number.name}" if number and code else "", phase)

    def ended(self, code: int, by: str, phase: str = "") -> None:
        """Count a kill; go on to another round after a complete one."""
        if by:
            self.kills[by] += 1
            self.phases[phase] += 1
        elif code:
            raise SystemExit(
                f"a run failed by itself ({code}):\n{(self.home / 'log.txt').read_text()[-3000:]}"
            )
        else:
            self.round += 1

    def one(self) -> None:
        """Start, and kill."""
        child = self.start()
        self.kill(child, child, self.draw.uniform(SOONEST, LATEST) * self.seconds)

    def two(self) -> None:
        """Start on two processes, and kill one of them."""
        child = self.start(*TWO)
        for _ in range(1200):
            other = _rank_1(child)
            if other:
                break
            done, status = os.waitpid(child, os.WNOHANG)
            if done:  # the round was complete already
                self.ended(os.waitstatus_to_exitcode(status), "")
                return
            time.sleep(0.05)
        victim = self.draw.choice([child, other or child])
        self.kill(child, victim, self.draw.uniform(5, 20))

    def complete(self) -> None:
        """Let the last round end, as a command of its own."""
        words = [*self.words, f"output_dir={self.folder}"]
        subprocess.run(
            [sys.executable, "-m", "kvexp", *words], check=True, capture_output=True, text=True, timeout=600
        )
        self.round += 1


def _rank_1(parent: int) -> int | None:
    children = Path(f"/proc/{parent}/task/{parent}/children")
    for child in children.read_text().split() if children.exists() else ():
        with contextlib.suppress(OSError):  # of a short life: what else rank 0 starts
            if b"LOCAL_RANK=1" in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return int(child)
    return None


def compare(torture: Torture) -> dict[str, int]:
    """Count what differs between the undisturbed round and all others."""
    found: Counter[str] = Counter(lost=0, doubled=0, other_samples=0, other_memories=0, leftovers=0)

    def parts(folder: Path) -> tuple[bytes, bytes]:
        [samples], [memory] = folder.rglob("samples.jsonl"), folder.glob("store/asm-*/memory.safetensors")
        return samples.read_bytes(), memory.read_bytes()

    samples, memory = parts(torture.home / "round-0")
    ids = [json.loads(row)["id"] for row in samples.splitlines()]
    for number in range(1, torture.round):
        folder = torture.home / f"round-{number}"
        theirs, other = parts(folder)
        seen = Counter(json.loads(row)["id"] for row in theirs.splitlines())
        found["lost"] += sum(one not in seen for one in ids)
        found["doubled"] += sum(count - 1 for count in seen.values())
        found["other_samples"] += theirs != samples
        found["other_memories"] += other != memory
        names = ("samples.*.jsonl", "samples-*", "work", ".*.tmp", "part-*", ".part-*")
        found["leftovers"] += sum(len(list(folder.rglob(name))) for name in names)
    return dict(found)


def main(words: list[str]) -> int:
    """Run the torture that the words describe."""
    own = {"kills": 50, "ranks": 4, "seed": 0}
    for word in list(words):
        name, _, value = word.partition("=")
        if name in own:
            own[name] = int(value)
            words.remove(word)
    torch.set_num_threads(1)
    home = Path(tempfile.mkdtemp(prefix="kvexp-torture-"))
    torture = Torture([*WORDS, *words], home, random.Random(own["seed"]))
    torture.undisturbed()
    torture.round = 1
    print(f"undisturbed: {torture.seconds:.1f} s", flush=True)
    while torture.kills.total() < own["kills"]:
        torture.one()
    while torture.kills.total() < own["kills"] + own["ranks"]:
        torture.two()
    torture.complete()
    found = compare(torture)
    print(f"{torture.kills.total()} kills: {dict(torture.kills)}, in {dict(torture.phases)}")
    print(f"{torture.round - 1} complete rounds: " + ", ".join(f"{n} {name}" for name, n in found.items()))
    shutil.rmtree(home)
    return int(any(found.values()))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
