"""The text of `--help`, made from the configuration files themselves: their first comment and their keys."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kvexp.advice import PARTS

if TYPE_CHECKING:
    from omegaconf import DictConfig

_KEY = re.compile(r"(?P<key>[A-Za-z]\w*): *(?P<value>[^#]*?) *(?:# *(?P<comment>.*))?")
_WITH_KNOBS = ("method", "task", "model", "calibration")
_WIDTH = 110

_INTRODUCTION = """\
kvexp: what is lost, and what is gained, when a model does not attend to the whole of its context?

  python -m kvexp group=choice key=value ...         one run: model x method x task x budget
  python -m kvexp -m method=full,asm budget=512,1k   a grid: every combination
"""
_EXAMPLES = """\
Examples
  python -m kvexp method=asm budget=1024 task=intents
  python -m kvexp -m method=no_context,truncate,asm,full seed=0,1,2
  python -m kvexp method=full model=hf model.id=Qwen/Qwen3-4B task=banking77 data_dir=PATH
  python -m kvexp method=asm --cfg job               show the configuration (and a grid's cells), run nothing
  python -m kvexp method=truncate --help             this page with the keys of another method

  -m a grid   -cd FOLDER your own YAML files   --cfg job [--resolve]   --info defaults-tree   --hydra-help
  A value with a space, a comma or a quote: "key='a, b'". Exit: 0 done, 1 a run failed, 2 a wrong command."""


def describe(path: Path) -> str:
    """Return the first comment of a YAML file that is no `@package` header."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.lstrip("# ").startswith("@"):
            return line.lstrip("# ").strip()
    return ""


def keys(path: Path) -> list[tuple[str, str, str]]:
    """Return (key, default, comment) for each plain top-level line of a YAML file."""
    found = (_KEY.fullmatch(line) for line in path.read_text(encoding="utf-8").splitlines())
    lines = [(line["key"], line["value"], line["comment"] or "") for line in found if line]
    return [line for line in lines if line[1]]


def catalogue(folders: Iterable[Path]) -> dict[str, dict[str, Path]]:
    """Return group -> choice -> file over configuration folders; an earlier folder wins."""
    found: dict[str, dict[str, Path]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.yaml")):
            name = path.relative_to(folder).with_suffix("")
            group = name.parts[0]
            if len(name.parts) > 1 and group not in ("hydra", "local"):
                found.setdefault(group, {}).setdefault("/".join(name.parts[1:]), path)
    return dict(sorted(found.items()))


def text(hydra: DictConfig) -> str:
    """Return the help page for the choices in Hydra's node, escaped for Hydra's template."""
    sources = hydra.runtime.config_sources
    folders = [Path(source.path) for source in sources if source.schema == "file"]
    chosen = {str(group): str(choice) for group, choice in hydra.runtime.choices.items()}
    groups = catalogue(folders)
    parts = [_INTRODUCTION, "Groups (group=choice; * is what this command line takes)"]
    parts += [_group(name, choices, chosen.get(name, "")) for name, choices in groups.items()]
    main = next((path for folder in folders if (path := folder / "config.yaml").is_file()), None)
    if main is not None:
        parts += [
            "",
            "Keys (key=value)",
            _table([(f"{key}={value}", note) for key, value, note in keys(main)]),
        ]
    for name in _WITH_KNOBS:
        file = groups.get(name, {}).get(chosen.get(name, ""))
        rows = [(f"{name}.{key}={value}", note) for key, value, note in keys(file)] if file else []
        if rows:
            parts += ["", f"Keys of {name}={chosen[name]}", _table(rows)]
    return "\n".join([*parts, "", _EXAMPLES]).replace("$", "$$")


def _group(name: str, choices: dict[str, Path], chosen: str) -> str:
    twins = [
        choice for choice in choices if choice.removesuffix("_small") in choices and choice[-6:] == "_small"
    ]
    rows = [
        (f"{'*' if choice == chosen else ' '} {choice}", describe(path))
        for choice, path in choices.items()
        if choice not in twins
    ]
    title = PARTS.get(name, name) + (" (and of each NAME_small, for a CPU)" if twins else "")
    return f"  {title}\n{_table(rows)}"


def _table(rows: list[tuple[str, str]]) -> str:
    column = min(max((len(left) for left, _ in rows), default=0), 40) + 2
    lines: list[str] = []
    for left, note in rows:
        wrapped = textwrap.wrap(note, _WIDTH - column - 4) or [""]
        first = f"    {left:<{column}}{wrapped[0]}" if len(left) < column else f"    {left}  {wrapped[0]}"
        lines += [first.rstrip(), *(f"    {'':<{column}}{more}" for more in wrapped[1:])]
    return "\n".join(lines)
