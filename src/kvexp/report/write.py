"""A report on disk: one page, tables and figures of every run below some folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvexp.files import write_atomic
from kvexp.report.collect import collect
from kvexp.report.details import detail
from kvexp.report.experiment import selected
from kvexp.report.groups import groups
from kvexp.report.items import Items
from kvexp.report.markdown import cells_csv, differences_csv, markdown, rows_csv
from kvexp.report.page_data import page_data

PAGE = "index.html"


def write_report(
    folders: Sequence[str | Path], out: Path, experiment: str | None = None, tables_only: bool = False
) -> Path:
    """Write the report into the folder `out` and return the path of its page, or of the Markdown tables.

        index.html                       everything, in one file that needs no network
        report.md                        the tables
        rows.csv, differences.csv, cells.csv
        figures/*.png, *.pdf

    Raises UserError when there is no run, no such experiment, or a library is missing.
    """
    library = ""
    if not tables_only:
        from kvexp.report.figures import pyplot
        from kvexp.report.page import plot_library

        pyplot()
        library = plot_library()
    found, missing = collect(folders), list[str]()
    if experiment is not None:
        kept, missing = selected(experiment, found.records)
        found = found.only(kept)
    items = Items()
    data, records = page_data(
        found, groups(found.records), items, [str(folder) for folder in folders], experiment, missing
    )
    texts = {
        "report.md": markdown(data),
        "rows.csv": rows_csv(data),
        "differences.csv": differences_csv(data),
        "cells.csv": cells_csv(records),
    }
    for name, text in texts.items():
        write_atomic(out / name, text.encode("utf-8", "replace"))
    if tables_only:
        return out / "report.md"
    from kvexp.report.page import render
    from kvexp.report.paper_figures import draw_figures

    draw_figures(data, out / "figures")
    page = render(data, [detail(record, items, out / PAGE) for record in records], library)
    write_atomic(out / PAGE, page.encode("utf-8"))
    return out / PAGE
