"""From a command line to Settings: what is resolved, what makes a cell, what is refused."""

from __future__ import annotations

import functools
import shlex
from pathlib import Path

import pytest

from kvexp import instantiate
from kvexp.budget import Budget
from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.schema import Settings
from kvexp.specs import LoggerSpec, ModelSpec, slug


def one(*words: str) -> Settings:
    (settings,) = settings_of(words)
    return settings


@functools.cache
def default_cell() -> str:
    return one().cell


def test_the_default_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVEXP_DATA_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    settings = one()
    assert settings.choices == {
        "model": "smollm2-135m",
        "method": "asm",
        "task": "intents",
        "calibration": "traces",
        "trainer": "cpu",
        "logger": "auto",
    }
    assert settings.model == ModelSpec("smollm2-135m", source="embedded")
    assert type(settings.method).__name__ == "ASM" and type(settings.task).__name__ == "Intents"
    assert (settings.budget, settings.seed, settings.limit, settings.resume) == (Budget(1024), 0, None, True)
    assert settings.data_dir is None and settings.calibration_task is None
    assert settings.store_dir == tmp_path / "outputs/store"
    assert settings.run_dir == tmp_path / "outputs/intents/smollm2-135m/asm/b1024" / settings.cell
    assert settings.trainer["_target_"] == "lightning.Trainer"
    assert settings.config["budget"] == 1024 and "hydra" not in settings.config


@pytest.mark.parametrize(
    "word",
    [
        "seed=1",
        "budget=1025",
        "split=validation",
        "limit=10",
        "fidelity=true",
        "method=truncate",
        "method.layout=shared",
        "task.n_test=20",
        "model.dtype=float32",
        "model.attention=reference",
        "model=tiny-llama",
        "calibration.n=10",
        "calibration.labels=gold",
        "calibration.empty_prefix=true",
        "calibration.task=trec",
    ],
)
def test_what_can_change_an_answer_changes_the_cell(word: str) -> None:
    assert one(word).cell != default_cell()


@pytest.mark.parametrize(
    "words",
    [
        ["output_dir=elsewhere"],
        ["store_dir=/tmp"],
        ["data_dir=/tmp"],
        ["batch_size=1"],
        ["calibration.batch_size=1"],
        ["resume=false"],
        ["fail_fast=true"],
        ["trainer=ddp"],
        ["logger=none"],
        ["model.device=cuda"],
        ["budget=1k"],
        ["budget=25%"],
    ],
)
def test_what_cannot_does_not(words: list[str]) -> None:
    assert one(*words).cell == default_cell()


def test_calibration_is_part_of_a_cell_only_where_a_method_learns() -> None:
    assert one("method=full", "calibration.n=10").cell == one("method=full").cell
    assert one("method=full", "calibration.empty_prefix=true").cell != one("method=full").cell


def test_a_share_is_of_the_length_that_a_task_states() -> None:
    assert one("method=snapkv", "budget=50%").budget == Budget(2048)
    words = ("method=snapkv", "task=passkey", "task.context_tokens=1000")
    assert one(*words, "budget=50%").budget == Budget(500)
    assert one(*words, "budget=50%").cell == one(*words, "budget=500").cell
    assert one("method=snapkv", "task=ruler", "task.length=2000", "budget=25%").budget == Budget(500)
    with pytest.raises(UserError, match="this task has no context of fixed length"):
        one("method=snapkv", "task=locomo", "budget=50%")


def test_a_method_that_ignores_the_budget_has_one_cell_for_all() -> None:
    assert one("method=full", "budget=512").budget == Budget(None)
    assert one("method=full", "budget=512").cell == one("method=full", "budget=full").cell


def test_the_command_repeats_the_cell() -> None:
    for settings in settings_of(["-m", "method=full,truncate", "budget=512,20%", "output_dir='a b'"]):
        words = shlex.split(settings.command)
        assert words[:3] == ["python", "-m", "kvexp"]
        assert one(*words[3:]) == settings


def test_traces_of_another_task() -> None:
    assert type(one("calibration.task=trec").calibration_task).__name__ == "Trec"
    assert type(one("calibration.task=nba").calibration_task).__name__ == "Nba"
    with pytest.raises(UserError, match="has no traces"):
        one("calibration.task=lm_eval")


def test_names_of_what_stands_for_many() -> None:
    assert one("model=hf", "model.id=Qwen/Qwen3-4B").choices["model"] == "hf-Qwen3-4B"
    settings = one("method=full", "task=lm_eval", "task.name=arc easy")
    assert settings.choices["task"] == "lm_eval-arc-easy"
    assert [slug(name) for name in ("../a b", "ok_1.5-x", "///")] == ["a-b", "ok_1.5-x", "unnamed"]


@pytest.mark.parametrize(
    "task", ["passkey", "continuation", "ruler", "math500", "aime24", "aime25", "recursive_state_query"]
)
def test_methods_that_place_units_need_contexts_of_several(task: str) -> None:
    for method in ("agentkvshift", "reposition", "cacheblend", "method.of"):
        words = ["method=kivi", "method.of=reposition"] if method == "method.of" else [f"method={method}"]
        with pytest.raises(
            UserError, match=f"task={task} is one unit in its own place, .*: take task=locomo"
        ):
            one(*words, f"task={task}")
    if task != "continuation":
        for method in ("agentkvshift_plus", "prophetkv"):
            with pytest.raises(UserError, match="is one unit in its own place"):
                one(f"method={method}", f"task={task}")
    for method in ("full", "full_recompute", "prefix_cache", "kivi"):
        assert one(f"method={method}", f"task={task}").method.id == method


@pytest.mark.parametrize("task", ["locomo", "ama_bench", "state_change", "intents", "trec"])
def test_tasks_of_units_take_methods_that_place_them(task: str) -> None:
    for method in ("agentkvshift", "reposition", "cacheblend"):
        assert one(f"method={method}", f"task={task}").task.units
    assert one("method=kivi", "method.of=agentkvshift", f"task={task}").method.needs_units


@pytest.mark.parametrize("task", ["locomo", "ama_bench"])
def test_a_single_note_is_no_prompt_of_units(task: str) -> None:
    with pytest.raises(UserError, match=r"is one unit in its own place.*task.k=10"):
        one("method=agentkvshift", f"task={task}", "task.k=1")
    assert one("method=full", f"task={task}", "task.k=1").task.k == 1


def test_remarks_only_beyond_the_context() -> None:
    assert one("budget=4096").remarks() == [] and one("budget=full").remarks() == []
    assert one("method=truncate", "budget=4097").remarks() == [
        "budget=4097 exceeds the context of at most 4096 tokens: everything fits"
    ]
    assert one("method=asm", "budget=4097").remarks() == [
        "budget=4097 is more entries than the context has tokens, at most 4096"
    ]


def test_a_key_that_is_taken_away_has_its_default() -> None:
    assert one("~budget") == one() or one("~budget").cell == default_cell()
    assert one("~seed", "~split").cell == default_cell()


def test_trainer_keys_that_are_not_set_may_stand() -> None:
    assert one("+trainer.fast_dev_run=false", "+trainer.limit_predict_batches=null").cell == default_cell()


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, "none"),
        ({"WANDB_API_KEY": "k"}, "wandb"),
        ({"WANDB_SWEEP_ID": "s"}, "wandb"),
        ({"WANDB_API_KEY": ""}, "none"),
    ],
)
def test_the_automatic_logger(environment: dict[str, str], name: str) -> None:
    assert LoggerSpec().resolved(environment) == name
    assert LoggerSpec("csv").resolved(environment) == "csv"


def test_how_long_a_process_may_be_silent() -> None:
    """It is no argument of Lightning's trainer, and no part of the cell."""
    patient = one("trainer=ddp", "trainer.accelerator=cpu", "trainer.silence_s=2.5")
    assert patient.trainer["silence_s"] == 2.5 and patient.cell == default_cell()
    assert one("trainer=ddp").trainer["silence_s"] == 600
    for wrong in ("0", "true", "null", "soon", ".inf", "-1"):
        with pytest.raises(UserError, match=r"^trainer\.silence_s=\S+ is not possible: it is the seconds"):
            one("trainer=ddp", f"trainer.silence_s={wrong}")


def test_a_trainer_is_made_in_one_place(tmp_path: Path) -> None:
    settings = one("+trainer.max_epochs=3")
    trainer = instantiate.trainer(
        settings.trainer, logger=False, enable_checkpointing=False, default_root_dir=tmp_path
    )
    assert trainer.max_epochs == 3 and trainer.num_devices == 1
    with pytest.raises(UserError, match=r"trainer cannot be made: .*accelerator"):
        instantiate.trainer({**settings.trainer, "accelerator": "abacus"})


@pytest.mark.parametrize(
    ("node", "told"),
    [
        ({}, "names no class"),
        ({"_target_": "kvexp.nothing.Here"}, "cannot be imported"),
        ({"_target_": "kvexp.errors.suggest"}, "is no class"),
        ({"_target_": "kvexp.errors.UserError"}, "is no dataclass"),
        ({"_target_": "kvexp.methods.baseline.truncate.Truncate", "kepe": "head"}, "did you mean 'keep'?"),
        (
            {"_target_": "kvexp.methods.baseline.truncate.Truncate", "_partial_": True},
            "there is no 'method._partial_'",
        ),
    ],
)
def test_files_of_methods_that_cannot_be_used(node: dict[str, object], told: str) -> None:
    with pytest.raises(UserError) as caught:
        instantiate.build("method", "mine", node)
    assert told in str(caught.value) and "\n" not in str(caught.value)
