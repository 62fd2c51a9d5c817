"""The command line as a whole: wrong lines, grids, exit codes, help; the run itself is replaced by a stub."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

WRONG = [
    (["methd=asm"], "did you mean 'method'?"),
    (["method=amm"], "did you mean 'asm'?"),
    (["task=intent"], "did you mean 'intents'?"),
    (["model=smollm"], "did you mean 'smollm2-135m'?"),
    (["experiment=asm"], "experiment=asm names a folder: write experiment=asm/fig3. It holds asm/fig3, "),
    (["experiment=tri/"], "It holds tri/"),
    (["-m", "experiment=asm/fig3_small,asm/table5_small"], "experiment=asm/fig3_small is a grid of its own"),
    (["experiment=asm/fig33"], "did you mean 'asm/fig3'?"),
    (["trainer=cpus"], "did you mean 'cpu'?"),
    (["bugdet=3"], "did you mean 'budget'?"),
    (["method.layuot=pooled"], "did you mean 'layout'?"),
    (["method.layout=poold"], "did you mean 'pooled'?"),
    (["method.iterations=2.5"], "method.iterations is a whole number"),
    (["method.whiten=7"], "method.whiten is one of"),
    (["calibration.nn=3"], "did you mean 'n'?"),
    (["calibration.labels=glod"], "did you mean 'gold'?"),
    (["calibration.task=trecc"], "did you mean 'trec'?"),
    (["+foo=1"], "there is no 'foo'"),
    (["budget=0"], "leaves no row"),
    (["budget=-5"], "leaves no row"),
    (["budget=abc"], "is not a budget"),
    (["budget=1.5"], "is not a budget"),
    (["seed=abc"], "seed is a whole number"),
    (["seed=-1"], "at least 0"),
    (["limit=0"], "at least 1"),
    (["fidelity=perhaps"], "fidelity is true or false"),
    (["split=tset"], "did you mean 'test'?"),
    (["data_dir=/no/such/folder"], "is not a folder"),
    (["model=hf"], "needs model.id"),
    (["method=asm", "task=lm_eval", "task.name=x"], "one context for all queries"),
    (["method=asm", "budget=4096", "task=nba", "task.levels=[3]"], "set task.levels=[0,1,2]"),
    (["method=prophetkv", "task=intents"], "chooses by the question before it is asked"),
    (["method=full,asm"], "add -m to run a grid"),
    (["-m", "method=full,amm"], "did you mean 'asm'?"),
    (["-m", "method=full", "budget=512,0"], "in the cell budget=0:"),
    (["-m", "method=full,asm", "method.layout=pooled"], "in the cell method=full: there is no"),
    (["experiment=intents_grid", "method.layout=pooled"], "in the cell method=no_context: there is no"),
    (["-m", "seed=0,1", "trainer=ddp"], "a grid cannot run with trainer.devices=auto"),
    (["method="], "names nothing"),
    (["method=1"], "there is no method '1'"),
    (
        ["experiment=aks/nope"],
        "Choices: aks/ama, aks/ama_small, aks/locomo, aks/locomo_small, aks/quantised,",
    ),
    (["experiment=nope"], "Choices: aks/..., asm/..., intents_grid, suite/..., tri/..."),
    (["task=[intents]"], "takes one choice"),
    (["task=null"], "names nothing"),
    (["~method"], "no method is chosen"),
    (["=x"], "names no key"),
    (["method"], "neither an option nor key=value"),
    (["data_dir='/a"], "close every quote"),
    (["a b=c"], "cannot read"),
    (["seed=${nope}"], "Interpolation key 'nope' not found"),
    (["--multirum"], "did you mean '--multirun'?"),
    (["--cfg", "jobs"], "invalid choice: 'jobs'"),
    (["--config-dir", "/no/such/folder"], "is not a folder"),
    (["-m", "seed=0,1", "hydra/launcher=nope"], "nope"),
    (["trainer.foo=1"], "+trainer.foo="),
    (["trainer.silence_s=5"], "trainer.silence_s is of several processes: choose trainer=ddp beside it"),
    (["+trainer.limit_predict_batches=1"], "trainer.limit_predict_batches=1 would learn from a part"),
    (["+trainer.fast_dev_run=true"], "lower calibration.n"),
    (["+trainer.overfit_batches=2"], "trainer.overfit_batches=2 would learn"),
    (["method.ridge=inf"], "method.ridge is a finite number"),
    (["-m", "budget=glob(*)"], "budget=glob(*) stands for no value"),
    (["method=full", "task=lm_eval", "task.name=x", "fidelity=true"], "fidelity=true means nothing to"),
    (
        ["method=full", "task=lm_eval", "task.name=x", "calibration.empty_prefix=true"],
        "calibration.empty_prefix=true means nothing to",
    ),
]

# Runs command lines in one process, with a stub in place of the run; prints one JSON line for each.
DRIVER = """
import contextlib, io, json, sys, types

cells, grids = [], []

def run(settings):
    cells.append({"method": settings.choices["method"], "budget": str(settings.budget), "seed": settings.seed,
                  "data_dir": settings.data_dir, "id": settings.model.id, "command": settings.command,
                  "run_dir": str(settings.run_dir)})
    if settings.seed == 13:
        raise RuntimeError("the sky fell\\nin two lines")
    if settings.seed == 14:
        from kvexp.errors import UserError
        raise UserError("this model has no layer for it")

if sys.argv[1] == "stub":
    sys.modules["kvexp.run"] = types.SimpleNamespace(
        run=run, finish_grid=lambda settings: grids.append([cell.cell for cell in settings]))

from kvexp.cli import main

for words in json.loads(sys.argv[2]):
    cells.clear(), grids.clear()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    print(json.dumps({"words": words, "code": code, "out": out.getvalue(), "err": err.getvalue(),
                      "cells": cells, "grids": grids, "torch": "torch" in sys.modules}))
"""


def in_one_process(
    kind: str, lines: list[list[str]], folder: Path, **environment: str
) -> list[dict[str, Any]]:
    """Run command lines in one fresh process and return what became of each."""
    inherited = {key: item for key, item in os.environ.items() if not key.startswith(("KVEXP_", "WANDB_"))}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, kind, json.dumps(lines)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**inherited, **environment},
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def process(words: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command line as a user does."""
    command = [sys.executable, "-m", "kvexp", *words]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env={**os.environ, **environment}, check=False
    )


def test_every_wrong_line_is_one_sentence_and_torch_stays_out(tmp_path: Path) -> None:
    results = in_one_process("real", [words for words, _ in WRONG], tmp_path)
    for (words, told), result in zip(WRONG, results, strict=True):
        assert result["code"] == 2, words
        assert result["err"].count("\n") == 1 and result["err"].startswith("kvexp: "), result["err"]
        assert told in result["err"], result["err"]
        assert result["out"] == "" and not result["torch"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["method=amm"], ["budget=0"], ["method=asm", "task=locomo"]])
def test_wrong_lines_as_real_processes(words: list[str], tmp_path: Path) -> None:
    done = process(words, tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("kvexp: ")


def test_a_configuration_says_where_its_data_come_from(tmp_path: Path) -> None:
    done = process(["method=asm", "budget=4096", "task=nba", "--cfg", "job", "--resolve"], tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    assert "budget: 4096" in done.stdout and "source: gh://SkyRiver-2000/RuleArena" in done.stdout


def test_help_lists_groups_choices_and_keys(tmp_path: Path) -> None:
    (result,) = in_one_process("real", [["--help", "method=truncate"]], tmp_path)
    assert result["code"] == 0 and not result["torch"]
    lines = [" ".join(line.split()) for line in result["out"].splitlines()]
    assert (
        "* truncate in-context learning at the budget: header and as many whole demonstrations as fit"
        in lines
    )
    assert "full attention to the whole context" in lines
    assert any(line.startswith("budget=1024 rows") for line in lines)
    assert any(line.startswith("method.keep=tail ") for line in lines)
    assert max(map(len, result["out"].splitlines())) <= 110


def test_hydra_s_own_views_and_the_version_work_without_torch(tmp_path: Path) -> None:
    lines = [
        ["--info", "defaults"],
        ["model=tiny-llama", "--info"],
        ["--info", "model=tiny-llama"],
        ["--info", "searchpath"],
        ["--cfg", "hydra", "--resolve"],
    ]
    lines += [["--hydra-help"], ["-sc", "install=bash"], ["--version"]]
    for result in in_one_process("real", lines, tmp_path):
        assert result["code"] == 0 and result["err"] == "" and not result["torch"], result


def test_completion_knows_the_choices(tmp_path: Path) -> None:
    done = process(["-sc", "query=bash"], tmp_path, COMP_LINE="kvexp method=trun", COMP_POINT="17")
    assert done.stdout.strip() == "method=truncate"


def test_a_run_gets_its_settings_and_a_folder(tmp_path: Path) -> None:
    (result,) = in_one_process(
        "stub", [["method=truncate", "--budget=20%", "_wandb_run=1", "--seed=3"]], tmp_path
    )
    (cell,) = result["cells"]
    assert result["code"] == 0
    assert (cell["method"], cell["budget"], cell["seed"]) == ("truncate", "819", 3)
    assert cell["command"] == "python -m kvexp method=truncate budget=20% seed=3"
    folder = Path(cell["run_dir"])
    assert folder.parent == tmp_path / "outputs/intents/smollm2-135m/truncate/b819"
    assert (folder / "log.txt").is_file() and not (folder / ".hydra").exists()


def test_values_survive_the_way_to_the_run(tmp_path: Path) -> None:
    names = ["with space", "a=b", "it's", 'say "hi"', "(x)[y]{z}", "back\\slash", "comma, dot.", "é%&;#!~"]
    lines, expected = [], []
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        quoted = "'" + str(folder).replace("'", "\\'") + "'"
        written = [f"data_dir={quoted}"] if "," in name else [f"data_dir={quoted}", f"data_dir={folder}"]
        lines += [["method=full", word] for word in written]  # a bare comma would be a grid
        expected += [str(folder)] * len(written)
    results = in_one_process("stub", lines, tmp_path)
    assert [result["cells"][0]["data_dir"] for result in results] == expected


def test_data_dir_comes_from_the_environment(tmp_path: Path) -> None:
    (result,) = in_one_process("stub", [["method=full"]], tmp_path, KVEXP_DATA_DIR=str(tmp_path))
    assert result["cells"][0]["data_dir"] == str(tmp_path)
    (result,) = in_one_process("stub", [["method=full"]], tmp_path, KVEXP_DATA_DIR="/no/such/folder")
    assert result["code"] == 2 and "KVEXP_DATA_DIR" in result["err"]


def test_failures_of_single_runs(tmp_path: Path) -> None:
    crash, refusal = in_one_process(
        "stub", [["method=full", "seed=13"], ["method=full", "seed=14"]], tmp_path
    )
    assert crash["code"] == 1 and "kvexp: RuntimeError: the sky fell\n" in crash["err"]
    assert "Traceback" not in crash["err"]
    log = Path(crash["cells"][0]["run_dir"]) / "log.txt"
    assert "Traceback" in log.read_text() and "the sky fell" in log.read_text()
    assert refusal["code"] == 2 and refusal["err"].endswith("kvexp: this model has no layer for it\n")


def test_files_that_cannot_be_written_are_one_sentence(tmp_path: Path) -> None:
    (run,) = in_one_process("stub", [["method=full", f"output_dir={tmp_path}"]], tmp_path)
    folder = Path(run["cells"][0]["run_dir"])
    shutil.rmtree(folder)
    folder.write_text("a file")
    lines = [["method=full", "output_dir=/dev/null"], ["method=full", f"output_dir={tmp_path}"]]
    lines.append(["-m", "method=full,truncate", "output_dir=/dev/null"])
    for result in in_one_process("stub", lines, tmp_path):
        assert result["code"] == 1 and "Traceback" not in result["err"], result["err"]
        assert "cannot be used" in result["err"] and "check output_dir" in result["err"]
        assert not result["cells"]
    assert result["err"].startswith("kvexp: /dev/null cannot be used (Not a directory): ")


def test_debugging_shows_the_traceback(tmp_path: Path) -> None:
    (crash,) = in_one_process("stub", [["method=full", "seed=13"]], tmp_path, KVEXP_DEBUG="1")
    assert "Traceback" in crash["err"]


def test_a_failing_cell_does_not_end_a_grid(tmp_path: Path) -> None:
    (result,) = in_one_process("stub", [["-m", "method=full,truncate", "seed=0,13,1"]], tmp_path)
    assert [(cell["method"], cell["seed"]) for cell in result["cells"]] == [
        (method, seed) for method in ("full", "truncate") for seed in (0, 13, 1)
    ]
    assert result["code"] == 1 and len(result["grids"][0]) == 6
    assert "kvexp: method=full seed=13: RuntimeError: the sky fell\n" in result["err"]
    assert result["err"].endswith("kvexp: 2 of 6 cells failed\n")


def test_fail_fast_stops_a_grid(tmp_path: Path) -> None:
    (result,) = in_one_process("stub", [["-m", "method=full", "seed=0,13,1,2", "fail_fast=true"]], tmp_path)
    assert [cell["seed"] for cell in result["cells"]] == [0, 13]
    assert result["code"] == 1
    assert result["err"].endswith("kvexp: 1 of 4 cells failed, 2 were not started (fail_fast=true)\n")


def test_a_good_grid_and_one_from_a_file(tmp_path: Path) -> None:
    lines = [["-m", "method=truncate", "budget=512,1k,20%,1024"], ["experiment=intents_grid", "seed=1"]]
    lines.append(["-m", "method=snapkv,rkv", "method.interval=64", "limit=2"])
    plain, experiment, knob = in_one_process("stub", lines, tmp_path)
    assert knob["code"] == 0 and [cell["method"] for cell in knob["cells"]] == ["snapkv", "rkv"]
    assert all("method.interval=64 limit=2" in cell["command"] for cell in knob["cells"])
    assert [cell["budget"] for cell in plain["cells"]] == ["512", "1024", "819", "1024"]
    assert plain["code"] == 0 and len(plain["grids"][0]) == 3  # 1k and 1024 are one cell
    assert [cell["method"] for cell in experiment["cells"]] == ["no_context", "truncate", "asm", "full"]
    assert experiment["code"] == 0 and len(experiment["grids"][0]) == 4
    assert {cell["seed"] for cell in experiment["cells"]} == {1}
    report = f"python -m kvexp.report {tmp_path}/outputs"
    assert plain["err"].endswith(f"{report}\n")
    assert experiment["err"].endswith(f"{report} --experiment intents_grid\n")


def test_a_grid_says_what_it_is_before_it_runs_and_can_be_seen_without_running(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /hydra/sweeper: grid\n"
        "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      limit: 2\n"
        "    grid:\n      - method=snapkv budget=512,1k\n      - method=rkv\n"
    )
    words = ["-cd", str(tmp_path), "experiment=mine", "method.interval=64", "output_dir=here"]
    looks = [[*words, "--cfg", "job"], ["-m", "--cfg", "job", *words], [*words, "-c", "job", "-p", "method"]]
    grid, look, asked, part = in_one_process("stub", [words, *looks], tmp_path)
    folder = tmp_path / "here"
    told = f"kvexp: a grid of 3 cells, below {folder}; with --cfg job it is listed and not run\n"
    assert grid["code"] == 0 and grid["err"].startswith(told)
    assert [cell["method"] for cell in grid["cells"]] == ["snapkv", "snapkv", "rkv"]
    assert all("method.interval=64" in cell["command"] for cell in grid["cells"])
    assert look["code"] == 0 and look["err"] == "" and not look["cells"] and asked["out"] == look["out"]
    config, _, listed = look["out"].partition("# the first of 3 cells of a grid; all have ")
    shown = yaml.safe_load(config)
    assert (shown["budget"], shown["limit"], shown["method"]["interval"]) == (512, 2, 64)
    shared, *cells = listed.splitlines()
    assert {"limit=2", "experiment=mine", "method.interval=64"} < set(shared.split())
    assert cells == ["# 1  method=snapkv budget=512", "# 2  method=snapkv budget=1k", "# 3  method=rkv"]
    assert yaml.safe_load(part["out"])["interval"] == 64 and "cells" not in part["out"]


def test_a_budget_beyond_the_context_is_said_and_allowed(tmp_path: Path) -> None:
    (result,) = in_one_process("stub", [["method=truncate", "budget=9000"]], tmp_path)
    assert result["code"] == 0 and "budget=9000 exceeds the context of at most 4096 tokens" in result["err"]


def test_files_of_one_s_own_beside_the_project_s(tmp_path: Path) -> None:
    (tmp_path / "mine/method").mkdir(parents=True)
    (tmp_path / "mine/method/head.yaml").write_text(
        "# the head of the context\n_target_: kvexp.methods.baseline.truncate.Truncate\nkeep: head\n"
    )
    lines = [["-cd", "mine", "method=head"], ["-cd", "mine", "--help"], ["-cd", "mine", "method=haed"]]
    run, page, wrong = in_one_process("stub", lines, tmp_path)
    assert run["code"] == 0 and run["cells"][0]["method"] == "head"
    assert f"--config-dir {tmp_path / 'mine'}" in run["cells"][0]["command"]
    assert "the head of the context" in page["out"]
    assert "did you mean 'head'?" in wrong["err"]
