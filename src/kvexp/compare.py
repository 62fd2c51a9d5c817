"""`python -m kvexp.compare A B`: two sets of runs, cell by cell, as paired differences B - A.

    python -m kvexp.compare outputs/intents/smollm2-135m/full outputs/intents/smollm2-135m/asm --json gap.json

A and B are folders of runs: two methods, two versions of the code, two number types. Cells are matched by
every choice in which the sets do not differ throughout. Exit codes: 0 compared, 1 the JSON
cannot be written, 2 nothing to compare.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvexp.ended import ended
from kvexp.errors import UserError

UNSOUND = ("broken", "lost")  # kinds of problems that keep a run's samples out of the comparison


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write the JSON where it is asked for."""
    args = _parser().parse_args(argv)
    return ended(lambda: _write(args), "name a file that can be written with --json")


def _write(args: argparse.Namespace) -> int:
    found = compare(args.first, args.second, args.metric)
    if args.json is not None:
        from kvexp.files import write_atomic

        text = json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        write_atomic(args.json, text.encode("utf-8", "backslashreplace"))
    print(render(found), end="")
    return 0


def compare(first: str | Path, second: str | Path, metrics: Sequence[str] = ()) -> dict[str, Any]:
    """Return the paired differences B - A of all matched cells, and of their means over seeds, as plain data.

    Raises UserError when a folder is missing, the tasks differ, no cell has a partner, or no metric is known
    of both. A run whose record or samples are unsound is left out, and named.
    """
    from kvexp.report.collect import collect
    from kvexp.report.matching import match

    found = [collect([folder]) for folder in (first, second)]
    unsound = [[p for p in one.problems if p.kind in UNSOUND] for one in found]
    sides = [
        _complete(folder, one.records, problems)
        for folder, one, problems in zip((first, second), found, unsound, strict=True)
    ]
    matched = match(*sides)
    if not matched.pairs:
        raise UserError(
            f"no cell of {first} has a partner in {second}: run the same task, budget and seeds in both"
        )
    return {
        "a": str(first),
        "b": str(second),
        "differing": {key: list(values) for key, values in matched.differing.items()},
        "rows": _corrected(_all_rows(matched.pairs, metrics)),
        "only_a": [record["folder"] for record in matched.only_first],
        "only_b": [record["folder"] for record in matched.only_second],
        **{f"unsound_{side}": _told(problems) for side, problems in zip("ab", unsound, strict=True)},
    }


def _complete(folder: str | Path, records: Sequence[Any], unsound: Sequence[Any]) -> list[Any]:
    """Return the complete records whose samples can be read. Raises UserError when there is none."""
    kept = [r for r in records if r["status"] == "complete" and r.get("samples") is not False]
    if not kept:
        why = [f" ({problem.folder} is {problem.kind}: {problem.reason})" for problem in unsound[:1]]
        failed = sum(record["status"] == "failed" for record in records)
        advice = (
            "run what failed again (python -m kvexp.status names the commands)" if failed else "wait for one"
        )
        raise UserError(f"no run below {folder} is complete{''.join(why)}: {advice}, or name another folder")
    return kept


def _all_rows(pairs: Sequence[Any], metrics: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of every metric.

    Raises UserError when one that was asked for has none, or all have none.
    """
    from kvexp.report.items import Items

    items = Items()
    by_name = {name: _rows(pairs, name, items) for name in dict.fromkeys(metrics or _headlines(pairs))}
    rows = [row for found in by_name.values() for row in found]
    untold = [name for name, found in by_name.items() if not found]
    if untold and (metrics or not rows):
        shared = [name for name in _shared(pairs) if name not in untold]
        raise UserError(
            f"no sample of both sets tells {' or '.join(untold)}: name another with --metric, such as"
            f" {' or '.join(shared[:3]) or 'one that both have'}"
        )
    return rows


def _told(problems: Sequence[Any]) -> list[dict[str, str]]:
    return [{"folder": problem.folder, "reason": problem.reason} for problem in problems]


def _rows(pairs: Sequence[Any], metric: str, items: Any) -> list[dict[str, Any]]:
    """Return a row for each pair of cells, and after those that differ by seed alone a row of their mean."""
    by_words: dict[tuple[str, str], list[Any]] = {}
    for pair in pairs:
        by_words.setdefault((pair.words, str(pair.second["choices"]["budget"])), []).append(pair)
    places = {words: place for place, (words, _) in reversed(list(enumerate(by_words)))}
    rows = []
    for words, budget in sorted(by_words, key=lambda one: (places[one[0]], _rows_of(one[1]), one[1])):
        members = by_words[words, budget]
        groups = [[pair] for pair in members]
        if len({pair.second["choices"]["seed"] for pair in members}) == len(members) > 1:
            groups.append(members)
        for group in groups:
            row = _row(group, metric, items)
            if row is not None:
                seeds = sorted({pair.second["choices"]["seed"] for pair in group})
                rows.append({"cells": words, "budget": budget, "seeds": seeds, **row})
    return rows


def _rows_of(budget: str) -> float:
    return float(budget) if budget.isdigit() else math.inf


def _row(group: Sequence[Any], metric: str, items: Any) -> dict[str, Any] | None:
    import statistics

    from kvexp.report.grid import paired_runs

    having = [p for p in group if metric in p.first["metrics"] and metric in p.second["metrics"]]
    found = paired_runs([(pair.second, pair.first) for pair in having], metric, items)
    if found is None:
        return None
    gap, difference = found
    means = [statistics.fmean(one["metrics"][metric]["value"] for one in side) for side in _sides(having)]
    return {
        "metric": metric,
        "higher_is_better": having[0].second["metrics"][metric]["higher_is_better"],
        "items": gap.n,
        "a": means[0],
        "b": means[1],
        "value": difference.value,
        "se": difference.se_items,
        "se_seeds": difference.se_seeds,
        "low": gap.low,
        "high": gap.high,
        "wins": gap.wins,
        "losses": gap.losses,
        "p": gap.p,
        "folders": [[pair.first["folder"], pair.second["folder"]] for pair in having],
    }


def _sides(pairs: Sequence[Any]) -> list[list[Mapping[str, Any]]]:
    return [[pair.first for pair in pairs], [pair.second for pair in pairs]]


def _corrected(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add Holm's p over the rows of one metric, and what may be claimed.

    Where seeds are averaged, their mean alone is tested: the seeds apart are not further comparisons.
    """
    from kvexp.report.significance import holm, verdict

    tested = [row for row in rows if _is_summary(row, rows)]
    for metric in dict.fromkeys(row["metric"] for row in tested):
        family = [row for row in tested if row["metric"] == metric]
        for row, p in zip(family, holm([row["p"] for row in family]), strict=True):
            row["holm"] = p
            row["verdict"] = verdict(row["value"], row["low"], row["high"], p, row["higher_is_better"])
    return list(rows)


def _is_summary(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> bool:
    same = ("cells", "budget", "metric")
    peers = [other for other in rows if all(other[key] == row[key] for key in same)]
    return len(row["folders"]) == max(len(other["folders"]) for other in peers)


def _headlines(pairs: Sequence[Any]) -> list[str]:
    from kvexp.report.grid import grids, headlines

    shown = dict.fromkeys(name for grid in grids([pair.second for pair in pairs]) for name in headlines(grid))
    shared = _shared(pairs)
    return [name for name in shown if name in shared] or shared[:1]


def _shared(pairs: Sequence[Any]) -> list[str]:
    return list(
        dict.fromkeys(n for pair in pairs for n in pair.second["metrics"] if n in pair.first["metrics"])
    )


def render(found: Mapping[str, Any]) -> str:
    """Return the table of `compare`'s result as text."""
    from kvexp.report.compare_table import table

    return table(found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvexp.compare",
        description="Compare two sets of runs cell by cell: paired differences B - A on the same items.",
    )
    parser.add_argument("first", metavar="A", help="a folder of runs, such as outputs/intents/MODEL/full")
    parser.add_argument("second", metavar="B", help="another one")
    parser.add_argument("--metric", action="append", default=[], help="default: the task's main scores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers there")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
