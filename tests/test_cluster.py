"""Which launcher may start which trainer, and that a job has time left after its warning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from kvexp.advice import no_choice
from kvexp.cluster import check_launcher, check_rank
from kvexp.errors import UserError

SLURM = {"tasks_per_node": 1, "nodes": 1, "timeout_min": 60, "signal_delay_s": 120}

WHOLE = SimpleNamespace(tp_plan=None)


def check(trainer: dict[str, Any], launcher: str = "SlurmLauncher", **node: Any) -> None:
    written = {"_target_": f"a.module.{launcher}", **SLURM, **node}
    config = OmegaConf.create({"trainer": trainer, "hydra": {"launcher": written}})
    settings: Any = SimpleNamespace(trainer=trainer, model=WHOLE)
    check_launcher(settings, config.hydra)


@pytest.mark.parametrize("launcher", ["BasicLauncher", "LocalLauncher", "JoblibLauncher"])
def test_only_slurm_starts_ranks_in_a_grid(launcher: str) -> None:
    check({"devices": 1}, launcher)
    for trainer in ({"devices": 2}, {"devices": "auto"}, {"devices": 1, "num_nodes": 2}):
        with pytest.raises(UserError, match="a grid cannot run with"):
            check(trainer, launcher)


def test_each_rank_is_one_task() -> None:
    check({"devices": 4, "num_nodes": 2}, tasks_per_node=4, nodes=2)
    check({"devices": 4}, tasks_per_node="${trainer.devices}")
    with pytest.raises(UserError, match=r"tasks_per_node=1 and trainer.devices=4 differ"):
        check({"devices": 4})
    with pytest.raises(UserError, match=r"nodes=1 and trainer.num_nodes=2 differ"):
        check({"devices": 1, "num_nodes": 2})
    with pytest.raises(UserError, match="write a number"):
        check({"devices": "auto"})


@pytest.mark.parametrize(("minutes", "delay", "enough"), [(2, 120, 3), (3, 121, 4), (10, 900, 16)])
def test_a_job_lasts_longer_than_its_warning(minutes: int, delay: int, enough: int) -> None:
    with pytest.raises(UserError, match=f"set timeout_min to {enough} or more"):
        check({"devices": 1}, timeout_min=minutes, signal_delay_s=delay)
    check({"devices": 1}, timeout_min=enough, signal_delay_s=delay)


def test_a_task_without_work_is_refused() -> None:
    alone: Any = SimpleNamespace(trainer={"devices": 1}, model=WHOLE)
    check_rank(alone, 0)
    with pytest.raises(UserError, match="this is task 3 of a Slurm step"):
        check_rank(alone, 3)
    shared: Any = SimpleNamespace(trainer={"devices": 4}, model=WHOLE)
    check_rank(shared, 3)


@pytest.mark.parametrize(
    ("group", "choice", "extra"),
    [("hydra/launcher", "submitit_slurm", "slurm"), ("hydra/sweeper", "optuna", "optuna")],
)
def test_a_plugin_that_is_not_installed_is_named(group: str, choice: str, extra: str) -> None:
    assert f"pip install 'kvexp[{extra}]'" in no_choice(group, choice, ["basic"])
