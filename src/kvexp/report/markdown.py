"""The tables of a report as Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from kvexp.report.items import Record
from kvexp.report.loggers import flatten, summary

Rows = Sequence[Sequence[str]]


def markdown(data: Mapping[str, Any]) -> str:
    """Return every table of the page's data as one Markdown text."""
    parts = [f"# {data['title']}", data["summary"] + "."]
    for group in data["groups"]:
        parts += [f"## {_escaped(group['title'])}", _results(group)]
        if group["differences"]:
            parts += ["Differences to full, on the same items:", _differences(group), _holm(group)]
        every = data["experiment"] is not None
        if group["papers"] and (every or any(one["ours"] for one in group["papers"])):
            parts += [
                "What papers report, for their models and settings, beside ours:",
                _papers(group, every),
            ]
    if data["missing"]:
        parts += [f"## Cells of {data['experiment']} without a run", _list(data["missing"])]
    if data["problems"]:
        rows = [[p["kind"], p["folder"], p["reason"]] for p in data["problems"]]
        parts += [
            "## Runs that are not, or not wholly, part of this",
            table(["state", "folder", "why"], rows),
        ]
    return "\n\n".join(parts) + "\n"


def table(heads: Sequence[str], rows: Rows) -> str:
    """Return a Markdown table; text is escaped, so that no cell breaks out of its place."""
    lines = [heads, ["---"] * len(heads), *([_escaped(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rows_csv(data: Mapping[str, Any]) -> str:
    """Return a line for each row and score of every group."""
    lines = []
    for group in data["groups"]:
        place = {key: group[key] for key in ("task", "model", "setting")}
        for row in group["rows"]:
            own = {"method": row["label"], "budget": row["budget"], "seeds": len(row["seeds"])}
            for name, one in row["metrics"].items():
                lines.append({**place, **own, "metric": name, **one, **row["cost"]})
    return _csv(lines)


def differences_csv(data: Mapping[str, Any]) -> str:
    """Return a line for each paired difference."""
    lines = []
    for group in data["groups"]:
        place = {key: group[key] for key in ("task", "model", "setting")}
        lines += [{**place, **difference} for difference in group["differences"]]
    return _csv(lines)


def cells_csv(records: Sequence[Record]) -> str:
    """Return a line for each run: its choices, every number, and the knobs that made it."""
    lines = []
    for record in records:
        named = {"cell": record["cell"], "status": record["status"], "error": record["error"] or ""}
        numbers = summary(record) if record["status"] == "complete" else {}
        knobs = flatten(record.get("identity") or {}, "identity.")
        lines.append({**named, **record["choices"], "folder": record["folder"], **numbers, **knobs})
    return _csv(lines)


def _csv(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return lines under the union of their columns, in the order in which those first appear."""
    columns = list(dict.fromkeys(key for line in lines for key in line))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _results(group: Mapping[str, Any]) -> str:
    names = group["metrics"][:5]
    rows = []
    for row in group["rows"]:
        costs = [_amount(row["cost"][name]) for name in ("kv_tokens", "mib", "encode_s", "token_ms")]
        scores = [score(row["metrics"].get(name)) for name in names]
        rows.append(
            [row["label"], row["budget"], *scores, *costs, *(f"failed: {e}" for e in row["failed"][:1])]
        )
    width = max((len(row) for row in rows), default=0)
    heads = ["method", "budget", *names, "KV-token equiv.", "MiB", "encode s", "ms / token"]
    heads += [""] * (width - len(heads))
    return table(heads, [[*row, *[""] * (width - len(row))] for row in rows])


def _differences(group: Mapping[str, Any]) -> str:
    heads = ["method", "budget", "score", "items", "difference", "95 % interval", "p, Holm", "against full"]
    rows = [
        [
            one["label"],
            one["budget"],
            one["metric"],
            str(one["items"]),
            score(one, "+.3f"),
            f"{one['low']:+.3f} to {one['high']:+.3f}",
            f"{one['holm']:.3f}",
            one["verdict"],
        ]
        for one in group["differences"]
    ]
    return table(heads, rows)


def _holm(group: Mapping[str, Any]) -> str:
    count = max(sum(one["metric"] == name for one in group["differences"]) for name in group["metrics"])
    return f"Holm's correction is over the {count} rows of one score; nothing is claimed above the 5 % level."


def _papers(group: Mapping[str, Any], every: bool) -> str:
    """Return the papers' numbers that have a row of ours beside them, or all of them."""
    heads = ["paper", "model", "method", "budget", "score", "*paper*", "ours", "our row", "our items", "note"]
    shown = [one for one in group["papers"] if every or one["ours"]]
    rows = []
    for one in shown:
        ours = one["ours"] or {}
        named = [f"{one['paper']}, {one['table']}", one["model"], one["method"], one["budget"], one["metric"]]
        form = ".1f" if ours and ours["value"] > 1 else ".3f"
        values = [
            f"{one['value']}",
            score(one["ours"], form),
            ours.get("label", "–"),
            str(ours.get("n", "–")),
        ]
        rows.append([*named, *values, "; ".join(filter(None, (one["setting"], one["note"])))])
    more = len(group["papers"]) - len(shown)
    return table(heads, rows) + (f"\n\n{more} more of this task have no row of ours." if more else "")


def score(entry: Mapping[str, Any] | None, form: str = ".3f") -> str:
    """Return a value with its errors: over items, then over seeds."""
    if entry is None:
        return "–"
    errors = [error for error in (entry["se"], entry["se_seeds"]) if error is not None]
    return " ".join([format(entry["value"], form), *(f"± {error:{form.lstrip('+')}}" for error in errors)])


def _amount(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {_escaped(line)}" for line in lines)


def _escaped(text: str) -> str:
    """Return text without markup: HTML, links and table bars stand as they were written."""
    for mark in "\\`*_[]<>|":
        text = text.replace(mark, f"\\{mark}" if mark not in "<>" else {"<": "&lt;", ">": "&gt;"}[mark])
    return " ".join(text.split())
