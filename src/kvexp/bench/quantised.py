"""Greedy decoding over rows in few bits, beside rows in full.

    python -m kvexp.bench quantised [bits=2,4,8] [method=kivi] [context=4k] [new=32] [repeats=5] [threads=1]
        [key=value ...]

A block makes `new` tokens behind the context, one sequence, none ends it; sides take turns, block by block,
after a warm-up. Printed: medians over blocks of tokens a second and of the time of `full` over each side's,
with the least and the most, and the bytes that the context's rows take. Other words are those of
`python -m kvexp`. JSON goes to OUTPUT_DIR/bench/quantised/MODEL.json.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

import torch

from kvexp.bench.decode import Ours, chosen_of
from kvexp.bench.decoder import Decoder, checked, numbers_of
from kvexp.bench.turns import spread, taken, written
from kvexp.measure.memory import mib

WORDS = {"bits": "2,4,8", "method": "kivi"}
NUMBERS = {"context": 4096, "new": 32, "repeats": 5, "threads": 1}


def main(arguments: Sequence[str]) -> int:
    """Measure, print and write JSON."""
    numbers, others = numbers_of(arguments, NUMBERS)
    chosen, others = chosen_of(others, WORDS)
    words = [word for word in others if not word.startswith("method.")]
    knobs = [word for word in others if word.startswith("method.")]  # of the quantised side alone
    sides_words = {"full": ["method=full", *words]}
    for bits in chosen["bits"].split(","):
        own = [f"method={chosen['method']}", f"method.bits={bits}", *knobs, *words]
        sides_words[f"{chosen['method']} {bits} bits"] = own
    run = checked("quantised", words, *sides_words.values())
    torch.set_num_threads(numbers["threads"])
    prompt = list(islice(Decoder(["method=full", *words]).text(), numbers["context"]))
    cells = {name: Ours(own, prompt, numbers["new"]) for name, own in sides_words.items()}
    sides: dict[str, Callable[[], float]] = {
        name: partial(cell.seconds, False) for name, cell in cells.items()
    }
    seconds, found = taken(sides, numbers["repeats"]), {}
    for name, took in seconds.items():
        row = {"seconds": took, "bytes": cells[name].cache.nbytes(), "prefill": cells[name].prefill}
        row |= {"tokens_per_s": spread([numbers["new"] / one for one in took])}
        row |= {"times": spread([full / one for full, one in zip(seconds["full"], took, strict=True)])}
        found[name] = row
        rate, times = ("{:.2f} ({:.2f}-{:.2f})".format(*row[key]) for key in ("tokens_per_s", "times"))
        print(f"{name:16} {rate} tokens/s, {times} times full, {mib(row['bytes']):.1f} MiB", flush=True)
    written(run, "quantised", {**numbers, "words": list(arguments), "sides": found, "load": os.getloadavg()})
    return 0
