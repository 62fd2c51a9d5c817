"""The table in the terminal: what each method scores, holds and costs, and how it differs from `full`."""

from __future__ import annotations

import io
import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import IO, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kvexp.report.grid import Estimate, Grid, Paired, Row, estimate, grids, headlines, paired
from kvexp.report.items import Items, Record

WIDTH = 100


def print_table(records: Iterable[Record], file: IO[str] | None = None) -> None:
    """Print the tables of what `read_records` returned, without colour unless `file` is a terminal."""
    stream = sys.stdout if file is None else file
    text = render(records, color=stream.isatty())
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()


def render(records: Iterable[Record], *, width: int = WIDTH, color: bool = False) -> str:
    """Return the text of one table for each task and model."""
    buffer = io.StringIO()
    console = Console(
        file=buffer, width=width, force_terminal=color, color_system="standard" if color else None
    )
    for grid in grids(records):
        console.print(_grid(grid, Items()))
    return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip().splitlines()) + "\n"


def _grid(grid: Grid, items: Items) -> Group:
    metrics = headlines(grid)
    several = any(len(row.records) > 1 for row in grid.rows)
    pairs = [pair for row in grid.rows for name in metrics if (pair := paired(grid, row, name, items))]
    parts: list[Any] = [Text(_title(grid), style="bold"), _main(grid, metrics, several, items)]
    parts += [Text(note) for note in _notes(grid, several)]
    if pairs:
        parts += [
            Text(),
            Text("difference to full, paired by item", style="bold"),
            _differences(pairs, several),
        ]
        parts += [Text(note) for note in _paired_notes(several)]
    return Group(*parts, Text())


def _title(grid: Grid) -> str:
    records = [record for row in grid.rows for record in row.records]
    seeds = sorted({record["choices"]["seed"] for row in grid.rows for record in (*row.records, *row.failed)})
    parts = [f"task {grid.task}", f"model {grid.model}", _plural("seed", seeds)]
    items = sorted({metric["n"] for record in records for metric in record["metrics"].values()})
    tokens = sorted({record["cache"]["context_tokens"] for record in records})
    if items:
        parts += [f"{_span(items)} items", f"context {_span(tokens)} tokens"]
    return " · ".join(parts)


def _main(grid: Grid, metrics: Sequence[str], several: bool, items: Items) -> Table:
    table = _table(["method"], ["budget", *(_heading(name, several) for name in metrics)])
    for heading in ("peak\nrows", "KV-token\nequiv.", "MiB", "encode\ns", "tokens\n/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in grid.rows:
        scores = [_estimate(estimate(row, name, items)) for name in metrics]
        if not row.records:
            scores = ["failed", *scores[1:]]
        table.add_row(row.label, row.budget, *scores, *_costs(row))
    return table


def _differences(pairs: Sequence[Paired], several: bool) -> Table:
    headings = [
        "budget",
        "items",
        _heading("difference", several),
        "95 % interval",
        "wins /\nlosses",
        "exact\np",
    ]
    table = _table(["method", "metric"], headings)
    named = None
    for pair in pairs:
        again, named = pair.row is named, pair.row
        table.add_row(
            "" if again else pair.row.label,
            pair.metric.rpartition("_")[2],
            "" if again else pair.row.budget,
            str(pair.items),
            _estimate(pair.difference, "+.3f"),
            f"{pair.low:+.3f} {pair.high:+.3f}",
            f"{pair.wins}/{pair.losses}",
            _p_value(pair.p),
        )
    return table


def _table(left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for heading in left:
        table.add_column(heading, overflow="fold")
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _costs(row: Row) -> list[str]:
    """Return peak rows, the largest over seeds, and means of the other costs."""
    caches = [record["cache"] for record in row.records]
    timings = [record["timing"] for record in row.records]
    peak = max((cache["entries_peak"] for cache in caches), default=None)
    mib = _mean([cache["bytes_peak"] for cache in caches], 2**20)
    return [
        "–" if peak is None else f"{peak:,.0f}",
        _number(_mean([cache["kv_token_equivalents"] for cache in caches]), ",.0f"),
        _number(mib, ",.1f"),
        _number(_mean([timing["encode_s"] for timing in timings]), ",.2f"),
        _number(_mean([timing["decode_tokens_per_s"] for timing in timings]), ",.1f"),
    ]


def _notes(grid: Grid, several: bool) -> list[str]:
    notes = [
        "peak rows: the most rows or memory entries held for the context, per layer and KV head on average.",
        "KV-token equiv.: the bytes held at the peak (MiB) over the bytes of one token's keys and values in"
        f" all layers{_full_size(grid)}.",
        "± is the standard error over items, then that over seeds."
        if several
        else "± is the standard error over items.",
    ]
    for row in grid.rows:
        for record in row.failed:
            where = f"{row.label}, budget {row.budget}, {_plural('seed', [record['choices']['seed']])}"
            notes.append(f"failed: {where}: {record['error']}")
        if several and len(row.records) == 1:
            notes.append(f"{row.label}, budget {row.budget}: one seed only.")
    return notes


def _full_size(grid: Grid) -> str:
    """Say what the whole context would hold, where it is the same for every run."""
    sizes = {record["cache"]["bytes_full"] for row in grid.rows for record in row.records}
    return f"; the whole context: {sizes.pop() / 2**20:,.1f} MiB" if len(sizes) == 1 else ""


def _paired_notes(several: bool) -> list[str]:
    notes = [
        "± and interval: bootstrap over items; p: McNemar's exact test, two-sided, of wins against losses."
    ]
    if several:
        notes.append(
            "An item asked under several seeds counts once, by its mean; the second ± is over seeds."
        )
    return notes


def _heading(name: str, several: bool) -> str:
    words = name.replace("_", "\n")
    return f"{words}\n±items ±seeds" if several else f"{words}\n±se"


def _estimate(found: Estimate | None, form: str = ".3f") -> str:
    if found is None:
        return "–"
    errors = [error for error in (found.se_items, found.se_seeds) if error is not None]
    return " ".join([format(found.value, form), *(f"±{error:.3f}".replace("±0.", "±.") for error in errors)])


def _p_value(p: float) -> str:
    return f"{p:.1e}" if p < 0.001 else f"{p:.3f}"


def _mean(values: Sequence[float | None], unit: float = 1) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.fmean(present) / unit if present else None


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _span(values: Sequence[int]) -> str:
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def _plural(word: str, values: Sequence[Any]) -> str:
    return f"{word}{'s' if len(values) > 1 else ''} {', '.join(map(str, values))}"
