"""The main job on the embedded default: ASM beside full attention on a generated task, in a few minutes on
a CPU.

    python scripts/demo.py [SEED] [quick]

Six runs of `task=intents` with SmolLM2-135M-Instruct: the floor, a truncated context, ASM in two layouts,
the whole context, and a control whose memory never saw the demonstrations. Run folders and plot land in
outputs/demo, a page with tables, figures and samples in outputs/demo/report. `quick` is the same with fewer
queries and traces, in outputs/demo_quick: to see that it works and what it looks like, not to claim anything.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvexp.cli import settings_of
from kvexp.ended import ended
from kvexp.errors import UserError
from kvexp.report.plot import storage_plot
from kvexp.report.record import read_records
from kvexp.report.write import write_report
from kvexp.run import finish_grid, run
from kvexp.schema import Settings

OUTPUT = Path("outputs/demo")
ASM = ("method=asm", "method.aggregate=mean", "method.iterations=2", "budget=1024")
ROWS = (
    ("method=no_context",),
    ("method=truncate", "budget=1024"),
    (*ASM, "method.layout=pooled"),
    (*ASM, "method.layout=shared"),
    ("method=full",),
    (*ASM, "method.layout=pooled", "calibration.empty_prefix=true", "calibration.labels=gold"),
)
QUICK = ("limit=40", "calibration.n=60")
QUICK_SAID = """
QUICK: 40 of 150 queries, and memories from 60 traces instead of 300. The errors are twice as large, and a
memory has learnt from less: claim nothing from this table, and run without quick for one that counts.
"""
CLAIM = """
What may be claimed: ASM compresses a context of about 4,096 tokens to storage worth 1,024 tokens (pooled)
or to 1,024 lookups (shared) and keeps most or all of its calibrated accuracy, although its traces carry no
label; a memory that never saw the demonstrations (the row with empty_prefix) stays at chance, 1/12. What
may not: that the shared layout beats a 1,024-token context at equal memory, since its 1,024 entries take
the room of about 3,100 tokens.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the six cells, then print table and claim, draw the plot and write the page."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("kvexp").setLevel(logging.INFO)
    start, (seed, quick) = time.perf_counter(), words_of(arguments)
    output = OUTPUT.with_name(f"{OUTPUT.name}_quick") if quick else OUTPUT
    cells = cells_of(seed, quick, output)
    for number, cell in enumerate(cells, 1):
        print(f"[{number}/{len(cells)}] {' '.join(ROWS[number - 1])}", file=sys.stderr, flush=True)
        run(cell)
    if quick:
        print(QUICK_SAID)
    finish_grid(cells)
    if not quick:
        print(CLAIM)
    records = [record for cell in cells for record in read_records(cell.run_dir)]
    picture = storage_plot(records, output / "accuracy_by_storage.png")
    page = write_report([output], output / "report")
    print(f"plot: {picture}\nrun folders: {output}\ntime: {time.perf_counter() - start:.0f} s")
    print(f"open this in a browser: {page.resolve().as_uri()}")
    return 0


def words_of(arguments: Sequence[str]) -> tuple[int, bool]:
    """Return the seed, and whether the quick form is asked for."""
    others = [word for word in arguments if word != "quick"]
    if len(others) > 1 or not all(word.isdecimal() for word in others):
        raise UserError(f"'{' '.join(others)}' is no seed: write python scripts/demo.py [SEED] [quick]")
    return int(others[0]) if others else 0, "quick" in arguments


def cells_of(seed: int, quick: bool, output: Path) -> list[Settings]:
    """Return the cells of ROWS."""
    common = ("task=intents", "model=smollm2-135m", f"seed={seed}", f"output_dir={output}", "logger=none")
    less = QUICK if quick else ()
    return [cell for row in ROWS for cell in settings_of([*row, *common, *less])]


if __name__ == "__main__":
    raise SystemExit(ended(lambda: main(sys.argv[1:]), "make room there, or start in another folder"))
