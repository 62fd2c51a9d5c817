"""`python -m kvexp.report outputs/`: tables, figures and one page of every run below a folder.

Exit codes: 0 written, 1 a file cannot be written, 2 the command line was wrong or there
is nothing to report. A mistake is one line.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from kvexp.ended import ended

OUT = "report"


def main(argv: Sequence[str] | None = None) -> int:
    """Write a report and say where it is."""
    args = _parser().parse_args(argv)
    return ended(lambda: _write(args), "name a folder that can be written with --out")


def _write(args: argparse.Namespace) -> int:
    from kvexp.report.write import write_report

    print(f"report: {write_report(args.folders, args.out, args.experiment, args.tables)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvexp.report",
        description="Collect the records of any number of runs into tables, figures and one HTML page.",
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="where runs lie, such as outputs")
    parser.add_argument(
        "--experiment", metavar="NAME", help="only the runs of this preset, such as asm/table2"
    )
    parser.add_argument("--out", type=Path, default=Path(OUT), metavar="FOLDER", help=f"default: {OUT}")
    parser.add_argument("--tables", action="store_true", help="Markdown and CSV alone: no page, no figures")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
