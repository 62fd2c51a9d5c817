"""The words of `python -m kvexp.bench attention`, checked before anything is clustered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvexp.bench.turns import folder_of
from kvexp.errors import UserError, suggest
from kvexp.methods.memory.grouping import Grouping
from kvexp.stats.samples import SampleStore

DEFAULTS = {
    "layouts": "pooled,group,shared",
    "lengths": "4096,8192,16384",
    "layers": "4,10,20",
    "rounds": "15",
    "local": "128",
    "recall": "0.995",
    "output_dir": "outputs",
    "samples": "",
    "kv_heads": "3",
}
LAYOUTS = ("pooled", "pairs", "group", "shared")
CELL = 32  # keys of a cell on average


@dataclass(frozen=True)
class Words:
    """What is measured, on which samples, and the folder that it is written to."""

    store: SampleStore
    layouts: list[str]
    lengths: list[int]
    layers: list[int]
    rounds: int
    local: int
    recall: float
    kv_heads: int
    folder: Path


def words_of(arguments: Sequence[str]) -> Words:
    """Return the words of a command line; raises UserError for one that cannot be measured."""
    options = DEFAULTS | {word.partition("=")[0]: word.partition("=")[2] for word in arguments}
    if set(options) - set(DEFAULTS) or not options["samples"]:
        raise UserError(
            f"the words are {', '.join(f'{name}=...' for name in DEFAULTS)}, and samples is needed"
        )
    layouts = options["layouts"].split(",")
    for layout in layouts:
        if layout not in LAYOUTS:
            near = suggest(layout, LAYOUTS) or "."
            raise UserError(f"there is no layout '{layout}'{near} Layouts: {', '.join(LAYOUTS)}")
    lengths, layers = _numbers(options, "lengths", CELL), _numbers(options, "layers", 0)
    (rounds,), (local,) = _numbers(options, "rounds", 2, 1), _numbers(options, "local", 1, 1)
    (kv_heads,) = _numbers(options, "kv_heads", 1, 1)
    store = _store(options["samples"], layers, kv_heads)
    for layout in layouts:
        Grouping.of(layout, store.fields["q"].shape[0], kv_heads)
    folder = folder_of(Path(options["output_dir"]), "attention")
    return Words(store, layouts, lengths, layers, rounds, local, _share(options["recall"]), kv_heads, folder)


def _numbers(options: dict[str, str], key: str, least: int, most: int | None = None) -> list[int]:
    """Return the numbers of a word, `most` of them at most, each `least` or more."""
    given = options[key].split(",")
    right = all(one.isdecimal() and int(one) >= least for one in given)
    if not right or (most is not None and len(given) > most):
        what = "a number" if most == 1 else "numbers"
        raise UserError(f"{key}={options[key]} is not {what} from {least}: write {key}={DEFAULTS[key]}")
    return [int(one) for one in given]


def _share(written: str) -> float:
    try:
        share = float(written)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UserError(f"recall={written} is no share above 0 up to 1: write recall={DEFAULTS['recall']}")
    return share


def _store(written: str, layers: Sequence[int], kv_heads: int) -> SampleStore:
    parts = sorted(Path(written).expanduser().glob("rank-*"))
    if not parts:
        raise UserError(
            f"samples={written} holds no samples: name a folder STORE_DIR/samples-*, which"
            " calibration.keep_samples=true leaves"
        )
    try:
        store = SampleStore.merge(parts)
        heads = store.fields["q"].shape[0]
    except (OSError, ValueError, LookupError) as error:
        raise UserError(f"samples={written} cannot be read ({error}): collect them anew") from error
    missing = [str(layer) for layer in layers if layer not in store.layers]
    if missing:
        raise UserError(
            f"samples={written} has no layer {', '.join(missing)}: write layers= with some of"
            f" {', '.join(map(str, store.layers))}"
        )
    if heads % kv_heads:
        raise UserError(f"kv_heads={kv_heads} does not divide the {heads} query heads of samples={written}")
    return store
