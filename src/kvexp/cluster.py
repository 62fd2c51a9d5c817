"""Which launcher fits which trainer, and how long a job may last; told before anything is submitted."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvexp import advice, check
from kvexp.errors import UserError
from kvexp.specs import NOT_STARTED

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from kvexp.schema import Settings

SPARE_S = 60  # of a job's time, before the warning that it ends: loading a model takes as long


def launcher_of(hydra: DictConfig) -> str:
    """Return the class name of the chosen launcher: BasicLauncher, SlurmLauncher, LocalLauncher, ..."""
    return str(hydra.launcher["_target_"]).rpartition(".")[2]


def check_launcher(settings: Settings, hydra: DictConfig) -> None:
    """Refuse a grid whose launcher does not start the processes that its trainer waits for.

    Lightning starts ranks by running the command line again. In a grid they would run the grid again and mix
    up its cells, so that only Slurm may start them, one task for each device.

    Raises:
        UserError: ranks that nobody would start, or a job that is over before it is warned.
    """
    if settings.model.tp_plan is not None:
        raise UserError(
            "a grid cannot run with model.tp_plan=auto, whose processes torchrun starts for one cell: run its"
            " cells one by one"
        )
    devices, nodes = settings.trainer.get("devices", 1), settings.trainer.get("num_nodes", 1)
    from omegaconf import OmegaConf

    if launcher_of(hydra) != "SlurmLauncher":
        if (str(devices), str(nodes)) != ("1", "1"):
            raise UserError(
                f"a grid cannot run with trainer.devices={check.show(devices)}: add cluster=slurm_ddp"
                " or trainer.devices=1, or let a W&B agent start single runs"
            )
        return
    if not str(devices).isdigit():
        raise UserError(
            f"trainer.devices={check.show(devices)} does not say how many tasks Slurm starts: write a number,"
            " such as trainer.devices=4"
        )
    with advice.given():
        node: Any = OmegaConf.to_container(hydra.launcher, resolve=True)
    _check_tasks("tasks_per_node", node["tasks_per_node"], "devices", devices)
    _check_tasks("nodes", node["nodes"], "num_nodes", nodes)
    minutes, delay = node["timeout_min"], node["signal_delay_s"]
    if minutes * 60 < delay + SPARE_S:
        needed = -(-(delay + SPARE_S) // 60)
        raise UserError(
            f"hydra.launcher.timeout_min={minutes} ends a job no later than its warning"
            f" (signal_delay_s={delay} before the end): set timeout_min to {needed} or more, or a shorter"
            " signal_delay_s"
        )


def _check_tasks(key: str, tasks: int, wanted: str, ranks: Any) -> None:
    if str(ranks) != str(tasks):
        raise UserError(
            f"hydra.launcher.{key}={tasks} and trainer.{wanted}={check.show(ranks)} differ, and each rank is"
            " one task: set both to one number, as cluster=slurm_ddp does"
        )


def check_rank(settings: Settings, rank: int) -> None:
    """Refuse a task above the first where the trainer has no use for it: it would end with nothing done.

    Raises:
        UserError: such as for agents that `srun -n 4` starts, each with a rank of its own.
    """
    devices, nodes = settings.trainer.get("devices", 1), settings.trainer.get("num_nodes", 1)
    if settings.model.tp_plan is not None:
        return  # every one holds its part of the model
    if rank > 0 and (str(devices), str(nodes)) == ("1", "1"):
        raise UserError(
            f"this is task {rank} of a Slurm step (SLURM_PROCID), and trainer.devices=1 has work for one:"
            " start one task, take trainer=ddp, or unset SLURM_PROCID in each"
        )


def check_slices(settings: Settings) -> None:
    """Refuse a model that is to be divided among processes that nobody has started, or that have other work.

    Raises:
        UserError: no launcher, or a trainer that gives each process the whole model.
    """
    devices, nodes = settings.trainer.get("devices", 1), settings.trainer.get("num_nodes", 1)
    if (str(devices), str(nodes)) != ("1", "1"):
        raise UserError(
            f"model.tp_plan=auto divides a model among processes, and trainer.devices={check.show(devices)}"
            " gives each of them the whole: take trainer=gpu or trainer=cpu, or leave tp_plan out"
        )
    started = [os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")]
    if not all(started) or started[2] == "1":
        raise UserError(NOT_STARTED)
