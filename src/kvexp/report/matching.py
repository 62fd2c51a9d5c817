"""Two sets of runs, matched cell by cell: by every choice but those in which the sets differ throughout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvexp.errors import UserError
from kvexp.report.grid import OFF, grids, settings_of
from kvexp.report.items import Record

WITH_THE_METHOD = ("method", "calibration", "notes", "empty_prefix")  # knobs that mean nothing to another
NEVER = ("fidelity",)  # changes no answer
TWICE = ("method.name", "task.id")  # said by `method` and `task` already
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Match:
    """A cell of the first set and one of the second; `words` are the choices that tell it from the others."""

    first: Record
    second: Record
    words: str


@dataclass(frozen=True)
class Matched:
    """Matched cells, what the sets differ in (first value, second value), and cells without a partner."""

    pairs: tuple[Match, ...]
    differing: Mapping[str, tuple[str, str]]
    only_first: tuple[Record, ...]
    only_second: tuple[Record, ...]


def match(first: Sequence[Record], second: Sequence[Record]) -> Matched:
    """Return the cells of two sets of complete records side by side.

    A choice whose values in one set are none of those in the other is what differs, and is not matched on;
    where the methods differ, neither are their knobs. One cell may stand beside several (a baseline beside
    every budget). Raises UserError when the tasks differ, or several cells of both sets agree in all that is
    left.
    """
    settings = {id(record): settings_of(record) for record in (*first, *second)}
    ours, theirs = ([settings[id(record)] for record in side] for side in (first, second))
    apart = _differing(ours, theirs)
    if "task" in apart:
        raise UserError(
            f"the tasks differ, {' in the first set and '.join(apart['task'])} in the second: name folders of"
            " the same task"
        )
    dropped = {key for key in _keys([*ours, *theirs]) if key in apart or _follows(key, apart)}
    groups: dict[str, tuple[list[Record], list[Record]]] = {}
    for place, side in enumerate((first, second)):
        for record in side:
            key = _key(settings[id(record)], dropped)
            groups.setdefault(key, ([], []))[place].append(record)
    pairs = []
    keys = [json.loads(key) for key, (a, b) in groups.items() if a and b]
    for key, (a, b) in groups.items():
        if len(a) > 1 and len(b) > 1:
            raise UserError(
                f"{len(a)} cells of the first set and {len(b)} of the second agree in all that is compared"
                f" (such as {a[0]['folder']} and {b[0]['folder']}): name narrower folders"
            )
        names = _labels(a), _labels(b)
        for one in a:
            for other in b:
                # Where one cell stands beside several, these are named by their knobs.
                extra = [names[0][one["cell"]]] if len(a) > 1 else []
                extra += [names[1][other["cell"]]] if len(b) > 1 else []
                pairs.append(Match(one, other, " ".join([_words(json.loads(key), keys), *extra])))
    return Matched(
        tuple(pairs),
        {key: values for key, values in apart.items() if key not in TWICE},
        tuple(record for a, b in groups.values() if not b for record in a),
        tuple(record for a, b in groups.values() if not a for record in b),
    )


def _differing(ours: Sequence[Settings], theirs: Sequence[Settings]) -> dict[str, tuple[str, str]]:
    found = {}
    for key in _keys([*ours, *theirs]):
        mine, other = ({_value(one.get(key)) for one in side} for side in (ours, theirs))
        if mine and other and not mine & other:
            found[key] = (", ".join(sorted(mine)), ", ".join(sorted(other)))
    if "method" in found:
        found = {key: value for key, value in found.items() if key == "method" or not _follows(key, found)}
    return found


def _follows(key: str, apart: Mapping[str, Any]) -> bool:
    top = key.split(".")[0]
    return top in NEVER or ("method" in apart and key != "method" and top in WITH_THE_METHOD)


def _keys(sides: Sequence[Settings]) -> list[str]:
    return list(dict.fromkeys(key for side in sides for key in side))


def _value(value: Any) -> str:
    return "off" if value in OFF else value if isinstance(value, str) else json.dumps(value, default=str)


def _key(settings: Settings, dropped: set[str]) -> str:
    kept = {key: _value(value) for key, value in settings.items() if key not in dropped and value not in OFF}
    return json.dumps(kept, sort_keys=True)


def _words(key: Settings, keys: Sequence[Settings]) -> str:
    """Return the task, and the choices in which a pair differs from other pairs."""
    varied = [name for name in _keys(keys) if len({other.get(name) for other in keys}) > 1]
    names = [name for name in varied if name not in ("task", "model", "budget", "seed")]
    model = [key["model"]] if "model" in varied else []
    return " ".join(
        [key.get("task", ""), *model, *(f"{n.rpartition('.')[2]}={key.get(n, 'off')}" for n in names)]
    ).strip()


def _labels(records: Sequence[Record]) -> dict[str, str]:
    """Return the name of each cell's row among others: the method, and the knobs that tell it apart."""
    rows = [row for grid in grids(records) for row in grid.rows]
    return {record["cell"]: row.label for row in rows for record in row.records}
