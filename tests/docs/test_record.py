"""Every command of docs/record.md runs, its example too, and it names every key of real records."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvexp import compare
from kvexp.cell import cell_hash, identity
from kvexp.cli import settings_of
from kvexp.measure import usage
from kvexp.report import __main__ as report
from kvexp.report import page, paper_figures
from kvexp.report.record import COUNTERS, PROVENANCE, STORAGE, TIMING, build_record, dump_record, metric
from kvexp.run import run as run_cell

TEXT = (Path(__file__).parents[2] / "docs/record.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    python -m (kvexp\.\w+) (.*)$", TEXT, re.MULTILINE)


def run(folder: Path, method: str, right: list[int]) -> None:
    record = build_record(
        cell=f"{method}{folder.name}",
        choices={"model": "smollm2-135m", "method": method, "task": "intents", "budget": "full", "seed": 0}
        | {"experiment": "intents_grid"},
        metrics={"accuracy": metric(sum(right) / len(right), 0.1, len(right))},
        cache=dict.fromkeys(STORAGE, 8),
        provenance={},
    )
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps(record))
    rows = [{"id": str(i), "query": f"q{i}", "scores": {"accuracy": r}} for i, r in enumerate(right)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(page, "plot_library", lambda: "")
    monkeypatch.setattr(paper_figures, "draw_figures", lambda data, folder: [])
    own = Path("outputs/intents/smollm2-135m")
    run(own / "full/bfull/1", "full", [1, 1, 0])
    run(own / "asm/bfull/2", "asm", [1, 0, 0])
    run(Path("outputs/before/3"), "asm", [1, 0, 0])
    run(Path("outputs/after/4"), "asm", [1, 1, 1])


@pytest.mark.parametrize(("module", "words"), COMMANDS)
def test_commands_run(module, words, runs, capsys):
    pytest.importorskip("matplotlib")
    main = {"kvexp.report": report.main, "kvexp.compare": compare.main}[module]
    assert main(shlex.split(words)) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert said.startswith("report: report/" if module == "kvexp.report" else "A: outputs/")


def test_all_commands_are_found():
    assert len(COMMANDS) == 5 and TEXT.count("python -m") == 5


def test_the_example_prints_every_complete_run(runs, capsys):
    [code] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(code, "record.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_every_field_is_named():
    for name in (*STORAGE, *COUNTERS, *usage.COUNTERS, *TIMING, *PROVENANCE):
        assert f"`{name}`" in TEXT, name


# Together they have the keys of every family: memories, eviction, packed rows, reuse; labels and questions.
REAL = (
    "method=asm method.lookup=two_level method.recall=true method.iterations=1 budget=64 calibration.n=24"
    " fidelity=true limit=4 task.context_tokens=400 task.n_labels=4 task.n_calibration=6",
    "task=state_change method=cacheblend limit=2",
    "task=state_change method=kivi method.of=snapkv method.residual=32 budget=80 limit=2",
)


def keys_of(record: dict[str, Any]) -> Iterator[str]:
    """Yield every key of a record but knobs (`identity`), versions, and what a task says of itself."""
    for name, section in record.items():
        yield name
        if name == "metrics":
            for score, entry in section.items():
                yield from (score.partition(" [")[0], *entry)
        elif isinstance(section, dict) and name != "identity":
            for key, value in section.items():
                inside = isinstance(value, dict) and name == "fidelity"
                yield from (key, *(value if inside else ()))


@pytest.mark.parametrize("line", REAL)
def test_a_real_record_has_no_key_that_is_not_told(line, tmp_path):
    [settings] = settings_of(["model=tiny-llama", "logger=none", f"output_dir={tmp_path}", *line.split()])
    record = json.loads(dump_record(run_cell(settings)))
    untold = {key for key in keys_of(record) if f"`{key}`" not in TEXT}
    assert not untold, "tell in docs/record.md what they mean"
    learns = settings.method.needs_calibration
    assert record["choices"]["calibration"] == ("traces" if learns else None)
    assert record["cell"] == settings.cell == cell_hash(identity(settings))
