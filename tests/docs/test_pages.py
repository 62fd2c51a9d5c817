"""Every command of the README and of these pages composes, or names a script and a part that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvexp.bench.__main__ import PARTS
from kvexp.cli import settings_of

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *(f"docs/{name}.md" for name in ("first-experiment", "choosing", "adding", "measured")))
COMMAND = re.compile(r"^    ((?:python|make|wandb) (?:.*\\\n)*.*)$", re.MULTILINE)
OURS = {"kvexp.status", "kvexp.report", "kvexp.compare", "pytest"}  # tested elsewhere; here their names are
PLUGINS = ("submitit", "slurm_", "--help")  # composed by the tests of their own pages


def commands() -> list[str]:
    found = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
        joined = (re.sub(r"\\\n\s*", "", command) for command in COMMAND.findall(text))
        found += [line.partition("#")[0].strip() for line in joined]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("command", commands())
def test_a_command_is_what_it_says(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions.jsonl").write_text('{"context": "a", "query": "b", "answer": "c"}\n')
    (tmp_path / "PATH").mkdir()
    words = shlex.split(command)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    elif words[0] == "wandb":
        assert words[1] in ("agent", "sweep")
    elif words[1].startswith("scripts/"):
        assert (ROOT / words[1]).is_file()
        assert all(re.fullmatch(r"--write|\w+|[\w.]+=\S+", word) for word in words[2:])
    elif words[2] == "kvexp.bench":
        assert words[3] == "PART" or words[3] in PARTS
    elif words[2] == "kvexp":
        assert any(name in command for name in PLUGINS) or settings_of(words[3:])
    else:
        assert words[2] in OURS
