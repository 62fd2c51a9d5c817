"""Figures of a report on paper, PNG and PDF: scores by budget, against memory and time, differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvexp.report.colours import MARKERS, SHAPES
from kvexp.report.facts import words
from kvexp.report.figures import pyplot, saved
from kvexp.specs import slug

Group = Mapping[str, Any]
Row = Mapping[str, Any]
DASHES = {"o": "-", "s": "--", "D": ":"}  # lines of one colour; all other markers have dashes and dots
SPREAD = 8  # the largest over the smallest value from which an axis is logarithmic
LINE_INCHES = 0.24  # height of one row of a figure with a row for each method
COSTS = (
    ("memory", "kv_tokens", "storage, KV-token equivalents"),
    ("latency", "token_ms", "decoding, ms per token"),
    ("latency", "encode_s", "encoding a context, s"),
)


def draw_figures(data: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the figures of every group and return the paths of the PNGs. Needs matplotlib."""
    written = []
    names: set[str] = set()
    with pyplot().rc_context(
        {
            "pdf.fonttype": 42,
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.3,
        }
    ):
        for place, group in enumerate(data["groups"]):
            if not group["metrics"]:
                continue
            name = slug(group["title"])[:80]
            name = name if name not in names else f"{name}-{place}"
            names.add(name)
            written += _group(group, data["palette"], folder / name)
    return written


def _group(group: Group, palette: Mapping[str, Any], stem: Path) -> list[Path]:
    looks = _looks(group, palette)
    metric = group["metrics"][0]
    rows = [row for row in group["rows"] if metric in row["metrics"]]
    budgets = sorted({int(row["budget"]) for row in rows if row["budget"] != "full"})
    draw = _by_budget if len(budgets) > 1 else _by_row
    made = [draw(group, metric, rows, looks, stem.with_name(f"{stem.name}-score.png"))]
    drawn: set[str] = set()
    for kind, cost, title in COSTS:
        known = [row for row in rows if row["cost"][cost]]
        if kind not in drawn and len(known) > 1:
            drawn.add(kind)
            path = stem.with_name(f"{stem.name}-{kind}.png")
            made.append(_against(group, metric, known, looks, cost, title, path))
    paired = [one for one in group["differences"] if one["metric"] == metric]
    if paired:
        made.append(_differences(group, paired, looks, stem.with_name(f"{stem.name}-differences.png")))
    return made


def _looks(group: Group, palette: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return colour and marker of each label, as on the page."""
    colours = {row["label"]: palette[row["method"]][0] for row in group["rows"]}
    markers = dict(zip(SHAPES, MARKERS, strict=True))
    return {
        label: {"color": colour, "marker": markers[group["shapes"][label]]}
        for label, colour in colours.items()
    }


def _by_budget(group: Group, metric: str, rows: Sequence[Row], looks: Any, path: Path) -> Path:
    figure, axis = pyplot().subplots(figsize=(6.4, 4.2))
    for label in dict.fromkeys(row["label"] for row in rows):
        mine = [row for row in rows if row["label"] == label]
        swept = [row for row in mine if row["budget"] != "full"]
        if swept:
            at = [int(row["budget"]) for row in swept]
            style = {**looks[label], "linestyle": DASHES.get(looks[label]["marker"], "-.")}
            _bars(axis, at, [row["metrics"][metric] for row in swept], style, label)
        for entry in (row["metrics"][metric] for row in mine if row["budget"] == "full"):
            colour = looks[label]["color"]
            axis.axhline(entry["value"], color=colour, linestyle="--", linewidth=1.2, label=label)
            axis.axhspan(entry["low"], entry["high"], color=colour, alpha=0.08, linewidth=0)
    axis.set_xscale("log", base=2)
    at = sorted({int(row["budget"]) for row in rows if row["budget"] != "full"})
    axis.set_xticks(at, [f"{budget:,}" for budget in at])
    axis.set_xlabel("budget, rows per layer and head")
    _score_axis(axis, group, metric, rows)
    return _finished(figure, axis, group, path)


def _by_row(group: Group, metric: str, rows: Sequence[Row], looks: Any, path: Path) -> Path:
    figure, axis = pyplot().subplots(figsize=(6.4, 1.2 + LINE_INCHES * len(rows)))
    higher = group["higher"][metric]
    order = sorted(rows, key=lambda row: row["metrics"][metric]["value"], reverse=not higher)
    for at, row in enumerate(order):
        entry, style = row["metrics"][metric], looks[row["label"]]
        axis.plot([entry["low"], entry["high"]], [at, at], color=style["color"], linewidth=1.5)
        axis.plot(entry["value"], at, markersize=5.5, **style)
    axis.set_yticks(range(len(order)), [_named(row) for row in order])
    axis.set_xlabel(words(metric))
    return _finished(figure, axis, group, path, legend=False)


def _against(
    group: Group, metric: str, rows: Sequence[Row], looks: Any, cost: str, title: str, path: Path
) -> Path:
    figure, axis = pyplot().subplots(figsize=(6.4, 4.2))
    told: set[str] = set()
    for row in rows:
        label = row["label"] if row["label"] not in told else None
        told.add(row["label"])
        style = {**looks[row["label"]], "linestyle": ""}
        _bars(axis, [row["cost"][cost]], [row["metrics"][metric]], style, label)
    found = [(row["cost"][cost], row["metrics"][metric]["value"]) for row in rows]
    best = front(found, group["higher"][metric])
    axis.step(*zip(*best, strict=True), where="post", color="#5a6470", linestyle=":", linewidth=1.2, zorder=0)
    if max(found)[0] > SPREAD * min(found)[0]:
        _logarithmic(axis, "x")
    axis.set_xlabel(title)
    _score_axis(axis, group, metric, rows)
    return _finished(figure, axis, group, path)


def _differences(group: Group, paired: Sequence[Mapping[str, Any]], looks: Any, path: Path) -> Path:
    figure, axis = pyplot().subplots(figsize=(6.4, 1.2 + LINE_INCHES * len(paired)))
    for at, one in enumerate(reversed(paired)):
        style = looks[one["label"]]
        axis.plot([one["low"], one["high"]], [at, at], color=style["color"], linewidth=1.5)
        face = style["color"] if one["verdict"] != "not shown" else "white"
        axis.plot(one["value"], at, markersize=5.5, markerfacecolor=face, **style)
    axis.axvline(0, color="#5a6470", linewidth=1)
    axis.set_yticks(range(len(paired)), [_named(one) for one in reversed(paired)])
    metric = words(paired[0]["metric"])
    axis.set_xlabel(f"difference to full in {metric}\nfilled: shown after Holm's correction")
    return _finished(figure, axis, group, path, legend=False)


def front(points: Sequence[tuple[float, float]], higher: bool) -> list[tuple[float, float]]:
    """Return the points (cost, score) that no other beats in both, from cheap to dear."""
    sign = 1 if higher else -1
    found: list[tuple[float, float]] = []
    for cost, value in sorted(points, key=lambda point: (point[0], -sign * point[1])):
        if not found or sign * value > sign * found[-1][1]:
            found.append((cost, value))
    return found


def _bars(axis: Any, at: Sequence[float], entries: Sequence[Row], style: Any, label: str | None) -> None:
    values = [one["value"] for one in entries]
    below = [one["value"] - one["low"] for one in entries]
    above = [one["high"] - one["value"] for one in entries]
    axis.errorbar(at, values, yerr=[below, above], label=label, capsize=2, markersize=5, **style)


def _score_axis(axis: Any, group: Group, metric: str, rows: Sequence[Row]) -> None:
    """Name the vertical axis; scores that are better low (KL, NLL) may span decades."""
    values = [row["metrics"][metric]["value"] for row in rows]
    if not group["higher"][metric] and 0 < min(values) * SPREAD < max(values):
        _logarithmic(axis, "y")
    axis.set_ylabel(words(metric))


def _logarithmic(axis: Any, which: str) -> None:
    """Make an axis logarithmic, with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    getattr(axis, f"set_{which}scale")("log")
    along = getattr(axis, f"{which}axis")
    along.set_major_locator(LogLocator(subs=(1, 2, 5)))
    along.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    along.set_minor_formatter(NullFormatter())


def _named(row: Mapping[str, Any]) -> str:
    return row["label"] if row["budget"] == "full" else f"{row['label']}, {int(row['budget']):,}"


def _finished(figure: Any, axis: Any, group: Group, path: Path, legend: bool = True) -> Path:
    axis.set_title(group["title"], fontsize=9, loc="left")
    if legend:
        axis.legend(fontsize=7.5, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return saved(figure, path, pdf=True)
