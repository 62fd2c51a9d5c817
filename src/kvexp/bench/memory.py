"""What a cache holds behind a prompt, and behind its answer.

    python -m kvexp.bench memory [methods=full,snapkv,...] [context=4k] [budget=1k] [new=256] [key=value ...]

For each method: rows per KV head of the fullest layer, bytes that the cache counts, and bytes of all storages
behind them (room for more rows included), as shares of those of `full` too. Other words are those of
`python -m kvexp`. JSON goes to OUTPUT_DIR/bench/memory/MODEL.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvexp.bench.decode import chosen_of
from kvexp.bench.decoder import Decoder, checked, numbers_of
from kvexp.bench.turns import written
from kvexp.measure.memory import mib

WORDS = {"methods": "full,snapkv,streaming_llm,triattention_plus,kivi"}
NUMBERS = {"context": 4096, "budget": 1024, "new": 256}


def main(arguments: Sequence[str]) -> int:
    """Measure, print and write JSON."""
    numbers, others = numbers_of(arguments, NUMBERS)
    chosen, words = chosen_of(others, WORDS)
    cells = {}
    for name in chosen["methods"].split(","):
        evicts = name not in ("full", "kivi", "ott")
        own = [f"budget={numbers['budget']}"] if evicts else []
        cells[name] = [f"method={name}", *own, *words]
    run = checked("memory", words, *cells.values())
    found: dict[str, Any] = {}
    for name, cell in cells.items():
        one = Decoder(cell).read(numbers["context"])
        found[name] = {"prompt": _held(one)}
        with one.attached():
            for _ in range(numbers["new"]):
                one.step()
        found[name]["answer"] = _held(one)
        for moment, held in found[name].items():
            counted, storage = mib(held["counted"]), mib(held["storage"])
            share = held["counted"] / next(iter(found.values()))[moment]["counted"]
            print(
                f"{name:18} {moment}: {held['rows']} rows, {counted:.2f} MiB counted ({share:.2f} of"
                f" the first), {storage:.2f} MiB of storage",
                flush=True,
            )
    written(run, "memory", {**numbers, "words": list(arguments), "methods": found})
    return 0


def _held(one: Decoder) -> dict[str, int]:
    return {"rows": one.rows(), "counted": one.cache.nbytes(), "storage": one.held()}
