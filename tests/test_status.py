"""What `python -m kvexp.status` tells of an output folder, and how fast."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvexp import status
from kvexp.cli import settings_of
from kvexp.files import file_lock
from kvexp.plan import write_plan
from kvexp.report.folder import RunFolder
from kvexp.report.record import build_record, metric
from kvexp.schema import Settings

CACHE = dict.fromkeys(
    ("context_tokens", "entries_nominal", "entries_peak", "entries_mean", "bytes_peak", "bytes_full"), 1
)


def record(settings: Settings, error: str | None = None) -> dict[str, Any]:
    return build_record(
        cell=settings.cell,
        choices={**settings.choices, "budget": "full", "seed": settings.seed},
        provenance={"command": settings.command},
        metrics=None if error else {"accuracy": metric(0.5, None, 2)},
        cache=None if error else {**CACHE, "kv_token_equivalents": 1.0},
        error=error,
    )


@functools.cache
def composed() -> list[Settings]:
    return settings_of(["-m", "model=tiny-llama", "method=full", "seed=0,1,2,3,4,5,7,8", "output_dir=OUT"])


def grid(folder: Path, seeds: str) -> list[Settings]:
    """Cells in `folder`; composing takes longer than everything else here, so it is done once."""
    chosen = [cell for cell in composed() if str(cell.seed) in seeds.split(",")]
    return [
        dataclasses.replace(cell, output_dir=folder, command=cell.command.replace("=OUT", f"={folder}"))
        for cell in chosen
    ]


@pytest.fixture
def six(tmp_path: Path) -> list[Settings]:
    """A planned grid: complete, failed, interrupted, broken, and two that never started."""
    cells = grid(tmp_path, "0,1,2,3,4,5")
    write_plan("python -m kvexp -m THE GRID", cells)
    folders = [RunFolder(cell.run_dir) for cell in cells]
    folders[0].write_record(record(cells[0]))
    folders[1].write_record(record(cells[1], "the sky fell"))
    folders[2].write_config(cells[2].config_text())
    (folders[2].path / "samples.jsonl").write_text('{"id": "a"}\n{"id"')
    (folders[2].path / "samples.1.jsonl").write_text('{"id": "b"}\n')
    folders[3].write_config(cells[3].config_text())
    (folders[3].path / "record.json").write_text('{"schema": 1, "cell"')
    return cells


def states(folder: Path, **more: Any) -> dict[str, status.Cell]:
    cells, _ = status.survey(folder, **more)
    return {cell.folder: cell for cell in cells}


def test_every_state_has_its_reason_and_its_command(tmp_path: Path, six: list[Settings]) -> None:
    found = states(tmp_path)
    told = [found[str(cell.run_dir.relative_to(tmp_path))] for cell in six]
    assert [cell.state for cell in told] == [
        "complete",
        "failed",
        "interrupted",
        "broken",
        "missing",
        "missing",
    ]
    assert told[1].reason == "the sky fell"
    assert told[2].reason == "ended without a record, 2 samples"
    assert told[3].reason.startswith("record.json cannot be read:")
    assert told[3].command == f"{six[3].command} resume=false"
    for index in (0, 1, 2, 4, 5):
        assert told[index].command == six[index].command
    (again,) = settings_of(told[4].command.split()[3:])
    assert again.run_dir == six[4].run_dir


def test_a_held_lock_means_running_and_a_stale_one_does_not(tmp_path: Path) -> None:
    (cell,) = grid(tmp_path, "0")
    RunFolder(cell.run_dir).write_config(cell.config_text())
    with file_lock(cell.run_dir / ".lock"):
        (running,) = states(tmp_path).values()
    assert running.state == "running" and running.reason.startswith("process ")
    assert running.command == cell.command  # from config.yaml: there is no plan
    (cell.run_dir / ".lock").write_text('{"pid": 1, "host": "gone"}')
    (stale,) = states(tmp_path).values()
    assert stale.state == "interrupted"


def test_a_failed_cell_that_runs_again_is_running(tmp_path: Path) -> None:
    (cell,) = grid(tmp_path, "0")
    RunFolder(cell.run_dir).write_record(record(cell, "no"))
    with file_lock(cell.run_dir / ".lock"):
        assert status.main([str(tmp_path)]) == 3
    assert status.main([str(tmp_path)]) == 1


def test_the_lines_and_exit_codes(tmp_path: Path, six: list[Settings], capsys: Any) -> None:
    assert status.main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    counts = "1 complete, 1 failed, 1 interrupted, 1 broken, 2 missing"
    assert lines[0] == f"6 cells: {counts}"
    assert lines[1].startswith("grid ") and lines[1].endswith(f": {counts}  python -m kvexp -m THE GRID")
    assert any(line.startswith("failed  ") and line.endswith("  the sky fell") for line in lines)
    assert f"    {six[1].command}" in lines
    for cell in six:
        RunFolder(cell.run_dir).write_record(record(cell))
    assert status.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "6 cells: 6 complete"


def test_one_grid_of_two(tmp_path: Path, six: list[Settings], capsys: Any) -> None:
    other = grid(tmp_path, "7,8")
    name = write_plan("python -m kvexp -m OTHER", other).stem
    assert set(states(tmp_path, grid=name)) == {str(c.run_dir.relative_to(tmp_path)) for c in other}
    assert status.main([str(tmp_path), "--grid", "nope"]) == 2
    assert "there is no grid nope" in capsys.readouterr().err
    assert len(states(tmp_path)) == 8
    assert status.main([str(tmp_path), "--grid", name, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["state"] for cell in told] == ["missing", "missing"]


def test_a_damaged_plan_is_told(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans/x.json").write_text("{")
    assert status.main([str(tmp_path)]) == 1
    assert "x.json is no plan of a grid" in capsys.readouterr().out


def test_what_was_set_aside_and_the_store_are_no_cells(tmp_path: Path) -> None:
    (cell,) = grid(tmp_path, "0")
    folder = RunFolder(cell.run_dir)
    folder.write_record(record(cell, "no"))
    folder.set_aside()
    folder.write_record(record(cell))
    deep = tmp_path / "store/a/b/c/d"
    deep.mkdir(parents=True)
    (deep / "record.json").write_text("{}")
    assert [found.state for found in states(tmp_path).values()] == ["complete"]


def test_a_moved_folder_is_named_in_the_command(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (cell,) = settings_of(["model=tiny-llama", "method=full"])
    RunFolder(cell.run_dir).write_config(cell.config_text())
    (here,) = states(Path("outputs")).values()
    assert here.command == "python -m kvexp model=tiny-llama method=full"
    (tmp_path / "outputs").rename(tmp_path / "my runs")
    (moved,) = states(tmp_path / "my runs").values()
    assert moved.command == f"python -m kvexp model=tiny-llama method=full 'output_dir={tmp_path}/my runs'"


def test_no_folder_is_a_sentence(tmp_path: Path, capsys: Any) -> None:
    assert status.main([str(tmp_path / "no")]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_a_thousand_cells_are_fast_and_torch_stays_out(tmp_path: Path) -> None:
    (cell,) = grid(tmp_path, "0")
    text = json.dumps(record(cell) | {"identity": {"knobs": ["x" * 40] * 100}})
    for index in range(1000):
        folder = tmp_path / f"intents/tiny-llama/m{index % 7}/b64/{index:010d}"
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(text)
        (folder / ".lock").write_text("")
    code = "import sys, kvexp.status as s; code = s.main(sys.argv[1:]); "
    code += "print({'torch', 'hydra', 'wandb', 'transformers'} & set(sys.modules), code)"
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    spent = time.perf_counter() - start
    assert done.stdout.splitlines() == ["1000 cells: 1000 complete", "set() 0"]
    assert spent < 5, spent


def test_files_that_are_no_record_are_broken_cells(tmp_path: Path) -> None:
    cell = grid(tmp_path, "0")[0]
    cell.run_dir.mkdir(parents=True)
    for text in ("[" * 100_000 + "]" * 100_000, json.dumps({**record(cell), "identity": "words"})):
        (cell.run_dir / "record.json").write_text(text)
        (found,) = states(tmp_path).values()
        assert found.state == "broken" and "\n" not in found.reason
    assert found.reason == "record.json cannot be read: identity must be an object or null"
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans/deep.json").write_text("[" * 100_000)
    assert states(tmp_path)["plans/deep.json"].state == "broken"


def test_a_folder_that_is_no_output_dir_is_refused(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    cell = grid(tmp_path / "outputs", "0")[0]
    folder = RunFolder(cell.run_dir)
    folder.write_record(record(cell))
    (folder.path / "old-1").mkdir()
    (folder.path / "old-1/record.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for wrong in (tmp_path, *list(cell.run_dir.parents)[:4], cell.run_dir):
        assert status.main([str(wrong)]) == 2
        told = capsys.readouterr()
        said = f"there are no cells of an output_dir in {wrong}: name the output_dir of the runs, outputs"
        assert told.err == f"kvexp: {said}\n" and not told.out
    assert status.main(["outputs"]) == 0
    (tmp_path / "other/notes").mkdir(parents=True)
    assert status.main(["other"]) == 2
    assert "name the output_dir of the runs, such as outputs" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert status.main(["empty"]) == 0
    assert capsys.readouterr().out == "0 cells: none\n"
