"""What TriAttention's scores cost: one dot product beside 17 cosines, and a prune beside decoding.

    python -m kvexp.bench scoring [repeats=5] [model=NAME] [budget=2048] [method=triattention ...]
        [store_dir=PATH] [output_dir=outputs]

The words are those of `python -m kvexp`; by default triattention_plus on the embedded model. `budget` rows
are read, then `repeats` intervals are decoded a token a step; each ends with a prune of all layers. Printed:

    forms    milliseconds to take S_trig of all rows, heads and layers from cached keys by one dot product,
             and by a cosine for each offset, in turn (medians); their ratio; the largest difference of two
             scores, over the largest score of the query head
    prune    milliseconds of a prune and of its parts, and of decoding an interval without it (medians over
             intervals); as shares of that: scoring, the whole prune, copying rows to where new ones have
             room, and what the evictor does in the other steps

JSON goes to OUTPUT_DIR/bench/scoring/MODEL.json.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from kvexp.bench.decoder import Decoder, checked, numbers_of
from kvexp.bench.turns import written
from kvexp.cache.evicting import EvictingLayer
from kvexp.cache.room import Room
from kvexp.errors import UserError
from kvexp.measure.timing import Stopwatch
from kvexp.methods.eviction import evictor as mechanism
from kvexp.methods.eviction import triscore
from kvexp.methods.eviction.view import View

PLACES: dict[str, tuple[Any, str]] = {
    "after": (mechanism.MethodEvictor, "after"),  # all that the evictor does
    "z_score": (triscore, "z_score"),
    "score": (triscore, "score"),
    "choose": (mechanism, "choose"),
    "keep": (EvictingLayer, "keep"),
    "room": (Room, "of"),  # a new buffer, where rows that stay have no room for others
}
PARTS = ("score", "z_score", "choose", "keep")  # of a prune; what is left of it is bookkeeping
SCORE_GOAL, PRUNE_GOAL, RATIO_GOAL = 0.005, 0.04, 30


def main(arguments: Sequence[str]) -> int:
    """Decode, compare, print, write."""
    numbers, words = numbers_of(arguments, {"repeats": 5})
    words = ["method=triattention_plus", "budget=2048", *words]
    run = checked("scoring", words)
    rows, interval = run.budget.rows, getattr(run.method, "interval", None)
    if rows is None or not interval or run.method.memory_id != "query_statistics":
        raise UserError("nothing is scored by query statistics while decoding: use method=triattention_plus")
    one = Decoder(words).read(rows)
    calls: dict[int, Any] = {}
    spent = [decoded(one, interval, calls) for _ in range(numbers["repeats"])]
    views = [View(layer, call, one.cache.evictor, place) for place, (layer, call) in sorted(calls.items())]
    found: dict[str, Any] = {
        "words": list(arguments),
        "threads": torch.get_num_threads(),
        "model": one.loaded.name,
    }
    found |= {"rows": one.rows(), "forms": forms(one.method, views, numbers["repeats"])}
    found["prune"] = shares(spent)
    print(f"{one.loaded.name}, {len(views)} layers, {one.rows()} rows, {found['threads']} threads")
    show(found["forms"], found["prune"], interval)
    written(run, "scoring", found)
    return 0


def decoded(one: Decoder, steps: int, calls: dict[int, Any]) -> dict[str, float]:
    """Decode an interval; return seconds by name.

    `decode`: all steps without what follows. `prune`, and its parts. `other`: what the evictor does in the
    other steps. `room`: copying rows to where new ones have room. `calls` gets the latest (layer, call) of
    each place.
    """
    watch, meter = Stopwatch(str(one.loaded.device)), one.cache.evictor.meter
    seconds = {"prune": 0.0, "other": 0.0}
    with one.attached(), timed(watch, calls):
        for _ in range(steps):
            scored, before = meter.scored, watch.seconds("after") or 0.0
            with watch("step"):
                one.step()
            name = "prune" if meter.scored > scored else "other"
            seconds[name] += (watch.seconds("after") or 0.0) - before
    seconds |= {name: watch.seconds(name) or 0.0 for name in ("room", *PARTS)}
    seconds["z_score"] -= seconds["score"]  # scores are taken inside
    rest = sum(seconds[name] for name in ("prune", "other", "room"))
    return {"decode": (watch.seconds("step") or 0.0) - rest, **seconds}


@contextmanager
def timed(watch: Stopwatch, calls: dict[int, Any]) -> Iterator[None]:
    """Time the evictor and the parts of a prune where they are called."""

    def span(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "after":
                evictor, layer, seen = args
                calls[evictor.layers.index(layer)] = layer, seen
            with watch(name):
                return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name, (place, attribute) in PLACES.items():
            stack.enter_context(patch.object(place, attribute, span(name, getattr(place, attribute))))
        yield


def forms(method: Any, views: Sequence[View], repeats: int) -> dict[str, float]:
    """Return median seconds of both forms of S_trig over all layers, their ratio and largest difference."""
    by_form = {
        form: replace(method, trig=True, norm="none", value_norm=False, gain="offsets", form=form)
        for form in ("dot", "cosines")
    }
    seconds: dict[str, list[float]] = {form: [] for form in by_form}
    scores: dict[str, list[torch.Tensor]] = {}
    for _ in range(repeats):
        for form, one in by_form.items():
            start = time.perf_counter()
            scores[form] = [triscore.score(one, view) for view in views]
            seconds[form].append(time.perf_counter() - start)
    gaps = [
        (dot - cosines).abs().amax(-1) / cosines.abs().amax(-1)
        for dot, cosines in zip(scores["dot"], scores["cosines"], strict=True)
    ]
    medians = {form: statistics.median(times) for form, times in seconds.items()}
    ratio = medians["cosines"] / medians["dot"]
    return {**medians, "ratio": ratio, "largest_difference": max(float(gap.max()) for gap in gaps)}


def shares(spent: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return medians over intervals of all seconds, and of the shares of decoding an interval."""
    medians = {name: statistics.median(one[name] for one in spent) for name in spent[0]}
    for name in ("score", "prune", "room", "other"):
        medians[f"{name}_share"] = statistics.median(one[name] / one["decode"] for one in spent)
    return medians


def show(found: dict[str, float], prune: dict[str, float], interval: int) -> None:
    """Print what was found."""
    print(
        f"forms: dot {1e3 * found['dot']:.2f} ms, cosines {1e3 * found['cosines']:.1f} ms, ratio"
        f" {found['ratio']:.0f} (goal {RATIO_GOAL}), largest difference {found['largest_difference']:.1e}"
    )
    rest = prune["prune"] - sum(prune[name] for name in PARTS)
    parts = ", ".join(f"{name} {1e3 * prune[name]:.2f}" for name in PARTS)
    print(f"prune: {1e3 * prune['prune']:.2f} ms: {parts}, rest {1e3 * rest:.2f}")
    print(f"interval of {interval} steps: {1e3 * prune['decode']:.0f} ms without eviction; of it")
    print(
        f"scoring {prune['score_share']:.2%} (goal {SCORE_GOAL:.1%}), prune {prune['prune_share']:.2%} (goal"
        f" {PRUNE_GOAL:.0%}), room for new rows {prune['room_share']:.2%}, evictor in the other steps"
        f" {prune['other_share']:.2%}"
    )
