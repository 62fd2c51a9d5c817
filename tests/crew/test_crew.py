"""Rank 0 stops wherever it is when another rank has gone; what a trainer means is known before a start."""

from __future__ import annotations

import functools
import signal
import threading
import time

import pytest

from kvexp import instantiate
from kvexp.crew.crew import ALONE, SIGNAL, First, RankLost
from kvexp.crew.launch import Launch, crew_of, many
from kvexp.crew.wire import SILENCE
from kvexp.errors import UserError

CPU = {"_target_": "lightning.Trainer", "accelerator": "cpu"}


def test_a_crew_of_one_asks_itself() -> None:
    assert ALONE.first and list(ALONE.share(3)) == [0, 1, 2]
    assert ALONE.broadcast(5) == 5 and ALONE.gather(5) == [5]
    with ALONE.watched():
        ALONE.barrier()
        ALONE.done()


@pytest.mark.parametrize(
    ("user", "error", "says"),
    [
        (False, RankLost, r"^rank 1 is gone \(why\): the same command goes on from here$"),
        (True, UserError, "^why$"),
    ],
)
def test_the_first_stops_in_the_middle_of_its_work(user: bool, error: type, says: str) -> None:
    crew, before = First(2), signal.getsignal(SIGNAL)
    timer = threading.Timer(0.1, crew.report, ("rank 1", "why", user))
    timer.start()
    begun = time.monotonic()
    with pytest.raises(error, match=says), crew.watched():
        time.sleep(30)
    assert time.monotonic() - begun < 5 and signal.getsignal(SIGNAL) is before
    crew.close()


def test_what_a_death_breaks_is_told_by_its_cause() -> None:
    crew = First(2)
    with pytest.raises(RankLost, match="rank 1 is gone") as caught, crew.watched():
        threading.Timer(0.1, crew.report, ("rank 1", "why", False)).start()
        raise RuntimeError("connection closed by peer")
    assert "closed by peer" in str(caught.value.__cause__ or caught.value.__context__)
    crew.close()


def test_a_report_after_the_work_does_nothing() -> None:
    crew = First(2)
    with crew.watched():
        pass
    crew.report("rank 1", "why", False)
    crew.close()
    time.sleep(0.05)


def test_which_trainers_may_mean_several_processes() -> None:
    assert not many({**CPU, "devices": 1}) and not many({**CPU, "devices": "1", "num_nodes": 1})
    assert many({**CPU, "devices": 2}) and many({"devices": "auto"}) and many({"devices": 1, "num_nodes": 2})


def launch(**knobs: object) -> Launch | None:
    trainer = {**CPU, **knobs}
    return crew_of(trainer, functools.partial(instantiate.trainer, trainer), "python -m kvexp")


def test_a_launch_knows_its_world() -> None:
    assert launch(devices="auto") is None  # of a CPU: one
    two = launch(devices=2, strategy="ddp")
    assert two is not None and (two.world, two.external, two.together) == (2, False, False)
    patient = launch(devices=2, strategy="ddp", silence_s=7)
    assert patient is not None and (two.silence, patient.silence) == (SILENCE, 7)
    with pytest.raises(UserError, match=r"trainer\.strategy=ddp alone"):
        launch(devices=2, strategy="ddp_spawn")


def test_processes_of_a_launcher_are_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LOCAL_RANK", "1"), ("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    two = launch(devices=2, strategy="ddp")
    assert two is not None and two.external and two.together
    with pytest.raises(UserError, match="process 1 of a job, and its trainer wants one process alone"):
        launch(devices=1)
