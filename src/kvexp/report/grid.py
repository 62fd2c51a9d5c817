"""Records put side by side: one row for each method and budget, seeds averaged, differences to `full` paired.

A row over several seeds keeps two errors apart: over items (an item asked under several seeds counts once,
with its mean) and over seeds.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

from kvexp.report.choices import differing, short_names
from kvexp.report.items import Answers, Items, Record, mean_by_item
from kvexp.report.loggers import flatten
from kvexp.report.record import with_fidelity
from kvexp.tasks.metrics import Difference
from kvexp.tasks.nested import bootstrap, paired_difference

HEADLINES = ("accuracy", "f1", "exact_match", "acc")
COMPANIONS = {
    "kl": ("top1_agreement", "perplexity"),
    "f1": ("exact_match", "contains", "f1_calibrated", "kl", "logprob"),
}
REFERENCES = ("full", "full_recompute")
MOST = 3  # metrics beside each other in a table, which leaves room for the method's name
FEW = 3  # as many differing settings are named in full
OFF = (None, False)
OF_THE_METHOD = ("method", "calibration", "notes", "budget", "seed", "empty_prefix", "fidelity")


@dataclass(frozen=True)
class Row:
    """The runs of one method and budget that differ by seed alone; `records` are the complete ones."""

    label: str
    budget: str
    records: tuple[Record, ...]
    failed: tuple[Record, ...]

    @property
    def method(self) -> str:
        """The method's name, without the knobs that `label` may add."""
        return (self.records or self.failed)[0]["choices"]["method"]


@dataclass(frozen=True)
class Grid:
    """The rows of one task and model."""

    task: str
    model: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard errors; `se_seeds` is None for one seed, `se_items` where nothing tells it."""

    value: float
    se_items: float | None
    se_seeds: float | None


@dataclass(frozen=True)
class Paired:
    """A row minus `full` on the same items.

    `low` and `high` bound the 95 % bootstrap interval over items. `wins` and `losses` count the items on
    which the row scores above or below `full`, and `p` is the exact two-sided probability of such a split by
    chance: McNemar's, for scores that are right or wrong.
    """

    row: Row
    metric: str
    items: int
    difference: Estimate
    low: float
    high: float
    wins: int
    losses: int
    p: float


def grids(records: Iterable[Record]) -> list[Grid]:
    """Return one grid for each task and model, rows in the order in which they first appear."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in map(with_fidelity, records):
        choices = record["choices"]
        groups.setdefault((choices["task"], choices["model"]), []).append(record)
    return [Grid(task, model, tuple(_rows(group))) for (task, model), group in groups.items()]


def headlines(grid: Grid) -> list[str]:
    """Return the metrics to show: the first known one (or the first there is), and what goes with it."""
    records = [record for row in grid.rows for record in row.records]
    names = list(dict.fromkeys(name for record in records for name in record["metrics"]))
    main = next((name for name in HEADLINES if name in names), names[0] if names else "accuracy")
    beside = COMPANIONS.get(main, (f"{main}_calibrated", "kl", "logprob"))
    return [main, *(name for name in beside if name in names)][:MOST]


def estimate(row: Row, metric: str, items: Items) -> Estimate | None:
    """Return the mean of `metric` over the row's seeds, or None when no complete run has it."""
    having = [record for record in row.records if metric in record["metrics"]]
    if not having:
        return None
    values = [record["metrics"][metric]["value"] for record in having]
    errors = [record["metrics"][metric]["stderr"] for record in having]
    if len(having) == 1:
        return Estimate(values[0], errors[0], None)
    over_items = [items.answers(record, metric) for record in having]
    if all(over_items):
        spread: float | None = bootstrap(list(mean_by_item(over_items).values())).stderr
    else:  # without samples: the error if every seed asked the same items, the largest that it can be
        spread = None if None in errors else statistics.fmean(errors)
    return Estimate(statistics.fmean(values), spread, _se(values))


def paired(grid: Grid, row: Row, metric: str, items: Items) -> Paired | None:
    """Return `row` minus the `full` row of the same settings, or None when they share no seed with items.

    Where there is none, `full_recompute` stands for it: it attends to everything too.
    """
    known = [other for other in grid.rows if _is_reference(other, row)]
    full = min(known, key=lambda other: REFERENCES.index(other.method), default=None)
    if full is None or row.method == full.method:
        return None
    references = {record["choices"]["seed"]: record for record in full.records}
    pairs = [(record, references.get(record["choices"]["seed"])) for record in row.records]
    found = paired_runs([(ours, theirs) for ours, theirs in pairs if theirs is not None], metric, items)
    if found is None:
        return None
    gap, difference = found
    return Paired(row, metric, gap.n, difference, gap.low, gap.high, gap.wins, gap.losses, gap.p)


def paired_runs(
    pairs: Sequence[tuple[Record, Record]], metric: str, items: Items
) -> tuple[Difference, Estimate] | None:
    """Return the first minus the second of some pairs of runs, one for each seed, over the items they share.

    The estimate has the error over items and, of several pairs, that over seeds. None where no items are
    shared.
    """
    ours, theirs = [], []
    for first, second in pairs:
        mine, whole = items.answers(first, metric), items.answers(second, metric)
        shared = [item for item in mine if item in whole]
        if shared:
            ours.append({item: mine[item] for item in shared})
            theirs.append({item: whole[item] for item in shared})
    if not ours:
        return None
    gap = paired_difference(list(mean_by_item(ours).values()), list(mean_by_item(theirs).values()))
    means = [_mean(a) - _mean(b) for a, b in zip(ours, theirs, strict=True)]
    se_seeds = _se(means) if len(means) > 1 else None
    return gap, Estimate(statistics.fmean(means), gap.stderr, se_seeds)


def _rows(records: Sequence[Record]) -> list[Row]:
    settings = [settings_of(record) for record in records]
    groups: dict[str, list[tuple[Record, str]]] = {}
    for record, chosen in zip(records, settings, strict=True):
        peers = [other for other in settings if other["method"] == chosen["method"]]
        varied = _varied(chosen, peers)
        identity = json.dumps([chosen["method"], chosen["budget"], varied], default=str)
        words = [_word(name, value) for name, value in varied.items()]
        groups.setdefault(identity, []).append((record, " ".join([chosen["method"], *words])))
    return [row for group in groups.values() for row in _split(group)]


def _word(name: str, value: Any) -> str:
    return name if value is True else f"{name}={'off' if value in OFF else value}"


def _varied(chosen: Mapping[str, Any], peers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that tell runs of one method apart, besides budget and seed, under short names.

    Those that are off (null, false) are left out: the other run says that it has them on. Where many settings
    differ, so are those that most runs share: an ablation is named by what it changes.
    """
    keys = dict.fromkeys(key for peer in peers for key in peer if key not in ("budget", "seed"))
    names = short_names(differing(keys, peers))
    usual = {}
    if len(names) > FEW:
        spread = {key: Counter(json.dumps(peer.get(key), default=str) for peer in peers) for key in names}
        common = {key: found.most_common(1)[0] for key, found in spread.items()}
        usual = {key: value for key, (value, count) in common.items() if 2 * count > len(peers)}
    shown = [key for key in names if usual.get(key) != json.dumps(chosen.get(key), default=str)]
    return {names[key]: chosen.get(key) for key in shown if key in usual or chosen.get(key) not in OFF}


def _split(group: Sequence[tuple[Record, str]]) -> list[Row]:
    """Return one row, or one for each run when a seed stands twice: that average is not over seeds."""
    seeds = Counter(record["choices"]["seed"] for record, _ in group)
    if max(seeds.values()) > 1:
        return [_row([record], f"{label} #{record['cell']}") for record, label in group]
    return [_row([record for record, _ in group], group[0][1])]


def _row(records: Sequence[Record], label: str) -> Row:
    complete = tuple(record for record in records if record["status"] == "complete")
    failed = tuple(record for record in records if record["status"] != "complete")
    return Row(label, str(records[0]["choices"]["budget"]), complete, failed)


def settings_of(record: Record) -> dict[str, Any]:
    """Return the names of the choices that matter to a result, and every knob that the record tells, flat."""
    names = {key: record["choices"][key] for key in ("model", "method", "task", "budget", "seed")}
    return {**flatten(record.get("identity") or {}), **names}


def setting_of(record: Record) -> dict[str, Any]:
    """Return what a record tells of its setting: all but the method's own choices, the budget and the seed.

    Settings that are off (null, false) are left out, so that one that is new and off changes no comparison.
    """
    known = settings_of(record)
    mine = {key: value for key, value in known.items() if key.split(".")[0] not in OF_THE_METHOD}
    return {key: value for key, value in mine.items() if value not in OFF}


def _is_reference(other: Row, row: Row) -> bool:
    """Whether `other` attends to its whole context, in the setting of `row`."""
    if other.method not in REFERENCES or not other.records or not row.records:
        return False
    theirs, ours = other.records[0], row.records[0]
    return not settings_of(theirs).get("empty_prefix") and setting_of(theirs) == setting_of(ours)


def _mean(answers: Answers) -> float:
    return statistics.fmean(statistics.fmean(found) for found in answers.values())


def _se(values: Sequence[float]) -> float:
    return statistics.stdev(values) / sqrt(len(values))
