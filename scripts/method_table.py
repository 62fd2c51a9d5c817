"""Print the table of eviction methods that stands in the README, made from the methods themselves.

python scripts/method_table.py           # prints it
python scripts/method_table.py --write   # puts it between the marks in README.md
"""

from __future__ import annotations

import sys
from typing import Any

from marked import Marked

from kvexp import method
from kvexp.compose import conf_dir

HEAD = ("method", "evicts", "always keeps", "chosen per", "scores from", "source")


def table() -> str:
    """Return the Markdown table of all eviction methods with their default knobs."""
    names = [path.stem for path in sorted((conf_dir() / "method").glob("*.yaml"))]
    methods = [one for one in map(method, names) if one.family == "eviction"]
    lines = [HEAD, ["---"] * len(HEAD), *map(row, methods)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def row(one: Any) -> list[str]:
    """Return the cells of one method."""
    reads = [*one.reads, *(["calibration text"] if one.needs_calibration else [])]
    source = f"{one.paper}, {one.year}" if one.paper else "–"
    return [f"`{one.id}`", when(one), kept(one), one.unit or "–", ", ".join(reads) or "–", source]


def when(one: Any) -> str:
    """Return when rows leave."""
    reading, decoding = one.during("prefill"), one.during("decode")
    parts = []
    if one.uses_budget and reading.prefill != "off":
        parts.append("prompt end")
    if one.uses_budget and decoding.interval is not None:
        parts.append("each step" if decoding.interval == 1 else f"every {decoding.interval} tokens")
    return ", ".join(parts) or "never"


def kept(one: Any) -> str:
    """Return what never leaves."""
    if one.keeps:
        return one.keeps
    parts = [f"first {one.sinks}"] if one.sinks else []
    latest = max(one.recent, one.window_size)
    parts += [f"latest {latest}"] if latest else []
    parts += ["prompt that fits"] if one.protect_prompt else []
    return ", ".join(parts) or "–"


PLACE = Marked("README.md", "eviction methods", table)

if __name__ == "__main__":
    sys.exit(PLACE.main(sys.argv[1:]))
