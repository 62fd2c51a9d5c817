"""How a crew comes together: its processes are started here, or by a launcher such as Slurm or torchrun.

Lightning says how many there are, and forms their process group (gloo on CPUs, nccl on GPUs); the address of
the line to rank 0 is the first thing that goes through it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from kvexp.crew.children import PARENT, Children
from kvexp.crew.crew import Crew, First, Member
from kvexp.crew.wire import SILENCE
from kvexp.errors import UserError
from kvexp.logs import quiet_lightning, rank

HERE = "127.0.0.1"
LINE = "KVEXP_LINE"  # port and token of the line to rank 0 on this machine
LOCAL = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def many(trainer: Mapping[str, Any]) -> bool:
    """Return whether a trainer's configuration may mean several processes; imports nothing."""
    return trainer.get("devices", 1) not in (1, "1") or trainer.get("num_nodes", 1) not in (1, None)


class Launch:
    """What is known of a crew before it has come together."""

    def __init__(self, make_trainer: Callable[..., Any], command: str, silence: float = SILENCE) -> None:
        """Ask Lightning how many processes its trainer wants; `command` starts one more of them.

        `silence`: seconds without a sign of life after which a process is given up.
        """
        self.command, self.silence, self._children = command, silence, Children()
        with quiet_lightning():
            self.trainer = make_trainer(
                logger=False,
                enable_checkpointing=False,
                enable_model_summary=False,
                enable_progress_bar=False,
            )
        self.devices, self.nodes = int(self.trainer.num_devices), int(self.trainer.num_nodes)
        self.world = self.devices * self.nodes
        self.external = False
        if self.world > 1:
            self._look()

    def _look(self) -> None:
        from lightning.pytorch.strategies import DDPStrategy

        strategy: Any = self.trainer.strategy
        started = type(strategy.launcher).__name__
        if not issubclass(type(strategy), DDPStrategy) or started != "_SubprocessScriptLauncher":
            raise UserError("several processes work as trainer.strategy=ddp alone: set it, or devices=1")
        environment = strategy.cluster_environment
        try:
            environment.validate_settings(num_devices=self.devices, num_nodes=self.nodes)
        except ValueError as error:
            raise UserError(str(error)) from error
        self.external = bool(environment.creates_processes_externally)
        node = int(os.environ.get("NODE_RANK") or os.environ.get("GROUP_RANK") or 0)
        if not self.external and node:  # the first process of a further machine
            os.environ["RANK"] = str(node * self.devices)

    @property
    def together(self) -> bool:
        """Whether the other ranks are up, or will be, whatever rank 0 finds to do."""
        return self.world > 1 and (self.external or self.nodes > 1)

    @contextmanager
    def joined(self) -> Iterator[Crew]:
        """Start what is to be started, and hand out this process's place; every rank enters.

        Inside the block rank 0 gets RankLost when another rank ends early, and the others end with rank 0.
        """
        before = {name: os.environ.get(name) for name in LOCAL}
        local = None if self.together else HERE
        crew, well = First(self.world, self.silence, local) if rank() == 0 else None, False
        try:
            with crew.watched() if crew else nullcontext():
                place = self._first(crew) if crew else self._member()
                with place.watched() if place is not crew else nullcontext():
                    yield place
            well = True
        except SystemExit as end:
            well = not end.code
            raise
        finally:
            if crew:
                crew.close(well)
                _restore(before)
            if not (crew and well):
                self._children.leave(well)

    def _first(self, crew: First) -> Crew:
        if not self.together:  # nobody is up yet: the line comes first, so that a failing start is noticed
            self._start(crew)
            crew.hub.wait()
        self._form()
        if self.together:
            if not self.external:
                self._start(crew)
            host = self.trainer.strategy.cluster_environment.main_address
            self.trainer.strategy.broadcast((host, *crew.hub.address))
            crew.hub.wait()
        return crew

    def _member(self) -> Crew:
        strategy: Any = self.trainer.strategy
        if LINE in os.environ:
            port, token = os.environ[LINE].split(":")
            me = Member(rank(), self.world, self.silence, HERE, int(port), token)
            self._form()
            return me
        if not self.external and not os.environ.get(PARENT):
            self._start(None)
        self._form()
        return Member(rank(), self.world, self.silence, *strategy.broadcast(None))

    def _form(self) -> None:
        """Form the process group; all ranks have to."""
        with quiet_lightning():
            self.trainer.strategy.setup_environment()

    def _start(self, crew: First | None) -> None:
        """Start this machine's further ranks, as the same command line with a rank in its environment."""
        environment = self.trainer.strategy.cluster_environment
        node = int(environment.node_rank())
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.devices)))
        os.environ |= {
            "MASTER_ADDR": environment.main_address,
            "MASTER_PORT": str(environment.main_port),
            "NODE_RANK": str(node),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": "0",
            "RANK": str(node * self.devices),
        }
        shared = {} if crew is None or self.together else {LINE: ":".join(map(str, crew.hub.address))}
        for local in range(1, self.devices):
            number = node * self.devices + local
            own = {"LOCAL_RANK": str(local), "RANK": str(number), **shared}
            failed = partial(_report, crew, f"rank {number}") if crew else None
            self._children.start(shlex.split(self.command)[1:], os.environ | own, failed)


def _report(crew: First, who: str, process: subprocess.Popen) -> None:
    """Tell of a process that ended badly before it had a line to rank 0."""
    time.sleep(1.0)  # the line says more, where there was one
    crew.report(who, f"process {process.pid} ended with code {process.returncode}", False)


def _restore(environment: Mapping[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def crew_of(trainer: Mapping[str, Any], make_trainer: Callable[..., Any], command: str) -> Launch | None:
    """Return the launch of a trainer's crew; None where one process works alone, without a launcher."""
    silence = float(trainer.get("silence_s", SILENCE))
    launch = Launch(make_trainer, command, silence) if many(trainer) else None
    alone = launch is None or launch.world == 1
    if alone and rank() > 0:
        raise UserError(
            f"this is process {rank()} of a job, and its trainer wants one process alone: set trainer.devices"
            " and trainer.num_nodes to what the launcher starts"
        )
    return None if alone else launch
