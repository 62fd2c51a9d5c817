"""docs/reproducing.md and docs/tasks.md: their table is that of the files, and their commands are valid."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
import yaml

import presets_of
from kvexp import commandline, grids
from kvexp.cli import settings_of

ROOT = Path(__file__).parents[2]
PAGES = ("reproducing", "tasks")
COMMANDS = [
    line.strip()
    for page in PAGES
    for line in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("    python -m kvexp ")
]


def test_the_table_is_that_of_the_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    text = (ROOT / "docs" / "reproducing.md").read_text(encoding="utf-8")
    placed = importlib.import_module("preset_table").PLACE.placed(text)
    assert placed == text, "run: python scripts/preset_table.py --write"


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_valid(command: str, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("{}")
    places = {"PATH": str(tmp_path), "FILE": str(tmp_path / "mine.jsonl")}
    words = [
        re.sub(r"\b(PATH|FILE)\b", lambda found: places[found[1]], word) for word in shlex.split(command)[3:]
    ]
    words = [word for word in words if word not in ("--cfg", "job")]
    [preset] = [word for word in words if word.startswith("experiment=")] or [None]
    if preset is None:
        assert settings_of(words)
        return
    sweeper = presets_of.node(preset.removeprefix("experiment="))["hydra"]["sweeper"]
    written = [word for word in words if word not in ("-m", preset)]
    cells = grids.cells(commandline.parse, sweeper.get("params") or {}, sweeper["grid"], written)
    assert settings_of(["hydra.mode=RUN", preset, *cells[-1]])


def test_a_preset_of_one_s_own_is_a_grid(tmp_path: Path) -> None:
    [text] = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs/reproducing.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert yaml.safe_load(text)["hydra"]["sweeper"]["params"] == {"task": "intents"}
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    cells = settings_of(["--config-dir", str(tmp_path), "experiment=mine"])
    assert [(cell.choices["method"], str(cell.budget)) for cell in cells] == [
        ("asm", "256"),
        ("asm", "512"),
        ("snapkv", "512"),
        ("full", "full"),
    ]
