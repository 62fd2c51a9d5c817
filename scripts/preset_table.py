"""Print the table of presets that stands in docs/reproducing.md, made from the files themselves.

python scripts/preset_table.py           # prints it
python scripts/preset_table.py --write   # puts it between the marks in docs/reproducing.md
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from marked import Marked

from kvexp import commandline, grids, helptext
from kvexp.compose import conf_dir


def table() -> str:
    """Return the Markdown table of all presets, and how many cells they and their small twins have."""
    folder = conf_dir() / "experiment"
    lines = ["| `experiment=` | cells | of the small twin | what it is |", "| --- | --- | --- | --- |"]
    for path in sorted(folder.glob("*/*.yaml")):
        twin = path.with_stem(f"{path.stem}_small")
        if twin.is_file():
            name = path.relative_to(folder).with_suffix("")
            lines.append(f"| `{name}` | {cells(path)} | {cells(twin)} | {helptext.describe(path)} |")
    return "\n".join(lines)


def cells(path: Path) -> int:
    """Return how many cells a preset has."""
    sweeper = yaml.safe_load(path.read_text(encoding="utf-8"))["hydra"]["sweeper"]
    return len(grids.cells(commandline.parse, sweeper.get("params") or {}, sweeper["grid"], []))


PLACE = Marked("docs/reproducing.md", "presets", table)

if __name__ == "__main__":
    sys.exit(PLACE.main(sys.argv[1:]))
