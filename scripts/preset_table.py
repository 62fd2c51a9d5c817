"""Print the table of presets that stands in docs/reproducing.md, made from the files themselves.

python scripts/preset_table.py           # prints it
python scripts/preset_table.py --write   # puts it between the marks in docs/reproducing.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from kvexp import commandline, grids, helptext
from kvexp.compose import conf_dir

PAGE = Path(__file__).parents[1] / "docs" / "reproducing.md"
START, END = "<!-- presets -->", "<!-- end of presets -->"


def main(arguments: Sequence[str]) -> int:
    """Print the table, or write it."""
    if list(arguments) == ["--write"]:
        PAGE.write_text(placed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table())
    return 0


def placed(text: str) -> str:
    """Return the page's text with the table between its marks."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{table()}\n{END}{after}"


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
