"""`python -m kvexp.report outputs/`: tables, figures and one page of every run below a folder.

Exit codes: 0 written, 2 the command line was wrong or there is nothing to report. A mistake is one line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvexp.errors import UserError

OUT = "report"


def main(argv: Sequence[str] | None = None) -> int:
    """Write a report and say where it is."""
    args = _parser().parse_args(argv)
    try:
        from kvexp.report.write import write_report

        written = write_report(args.folders, args.out, args.experiment, args.tables)
    except UserError as error:
        print(f"kvexp: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"report: {written}")
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
