"""Every command of these pages: kvexp's compose, scripts and sweep files exist, tools take the words."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from kvexp import status
from kvexp.cli import settings_of
from kvexp.errors import UserError

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"^    ((?:python -m kvexp|torchrun |scripts/|wandb |pip install ).*)$", re.MULTILINE)
PAGES = [ROOT / "docs/slurm.md", ROOT / "docs/wandb.md"]
COMMANDS = [
    pytest.param(command, id=f"{path.stem}-{number}")
    for path in PAGES
    for number, command in enumerate(COMMAND.findall(path.read_text(encoding="utf-8")))
]
PLUGINS = {"cluster=": "submitit", "submitit": "submitit", "sweep=optuna": "optuna"}


def test_every_indented_line_is_such_a_command() -> None:
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        indented = [line for line in text.splitlines() if line.startswith("    ")]
        assert len(indented) == len(COMMAND.findall(text)), path
    assert len(COMMANDS) >= 20


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVEXP_DATA_DIR", raising=False)
    words = shlex.split(command)
    if words[:2] == ["pip", "install"]:
        extra = re.fullmatch(r"kvexp\[(\w+)\]", words[2])
        declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert extra and re.search(rf"^{extra[1]} = \[", declared, re.MULTILINE)
    elif words[0] == "wandb":
        for file in (word for word in words if word.endswith(".yaml")):
            assert yaml.safe_load((ROOT / file).read_text())["command"]
        assert words[1] in ("sweep", "agent")
    elif words[0] == "torchrun":
        assert words[1].startswith("--nproc-per-node=") and words[2:4] == ["-m", "kvexp"]
        composed(words[4:], command)
    elif words[0].startswith("scripts/"):
        assert (ROOT / words[0]).stat().st_mode & 0o111
    elif words[2] == "kvexp.status":
        (tmp_path / "outputs").mkdir()
        assert status.main(words[3:]) == 0
        assert capsys.readouterr().out == "0 cells: none\n"
    else:
        composed(words[3:], command)


def composed(words: list[str], command: str) -> None:
    """Compose a command of kvexp; where it needs a plugin that is absent, it says which extra has it."""
    needed = [plugin for start, plugin in PLUGINS.items() if start in command]
    absent = [name for name in needed if find_spec(name) is None]
    if absent:
        with pytest.raises(UserError, match=r"pip install 'kvexp\["):
            settings_of(words)
        return
    assert settings_of(words)
