"""What decoding holds and how long it takes, beside full attention.

    python scripts/decode_bench.py PART [PART ...] [number=...] [key=value ...]

    memory      tokens=6000 are made behind a short prompt, none ends them, budget 512. At each mark=2000:
                rows, bytes that the cache counts, all tensors that came alive, the peak of the process, and
                the most that the cache's meter saw. Full attention to the first mark, as the contrast; each
                in a process of its own
    latency     median, 99th percentile and longest of steps=400 at budget 512 behind prompt=512 tokens:
                full attention, triattention_plus (at once, and with method.smooth=true) and h2o, in turn
    throughput  the largest batch that fits into bytes=64M at prompt=512 and new=512 tokens, by what one
                sequence was seen to hold at most, and its rate over timed=128 steps in the middle of the
                answer: full attention and triattention_plus at budget 256, in turn
    session     turns=10 of heard=200 tokens that are read and said=56 that are made, unless more than
                bytes=64M are held: full attention, and triattention_plus at budget 512

Words such as model=NAME, budget=128, store_dir=PATH go to every cell, as to `python -m kvexp`. Bytes are
those of whole storages between forwards, room of buffers included. A line for each measurement is printed;
JSON goes to OUTPUT_DIR/decode_bench/MODEL/PART.json (memory_METHOD.json for memory).
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch

from kvexp.bench.decoder import Decoder, in_turn, numbers_of
from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.measure.memory import mib, peak_rss, tensor_bytes

Numbers = dict[str, int]
NUMBERS = {"tokens": 6000, "mark": 2000, "steps": 400, "prompt": 512, "new": 512, "timed": 128}
NUMBERS |= {"bytes": 64 << 20, "turns": 10, "heard": 200, "said": 56}
PLUS, FULL, OPENING = "method=triattention_plus", "method=full", 64


def memory(words: Sequence[str], numbers: Numbers) -> dict[str, Any]:
    """Decode with each method in a process of its own, which writes what it found."""
    for method, tokens in ((PLUS, numbers["tokens"]), (FULL, numbers["mark"])):
        own = [*method.split(), "budget=512", f"tokens={tokens}", f"mark={numbers['mark']}"]
        subprocess.run([sys.executable, __file__, "memory_of", *own, *words], check=True)
    return {}


def memory_of(words: Sequence[str], numbers: Numbers) -> dict[str, Any]:
    """Decode with the method of `words`; return what is held at each mark."""
    one = Decoder(words)
    before, marks = alive(), []
    one.read(OPENING)
    with one.attached():
        for made in range(1, numbers["tokens"] + 1):
            one.step()
            if made % numbers["mark"] and made != numbers["tokens"]:
                continue
            found = {"made": made, "rows": one.rows(), "counted": one.cache.nbytes()}
            found |= {"alive": alive() - before, "process": peak_rss()}
            if one.cache.evictor:
                found["meter"] = one.cache.evictor.meter.bytes_peak
            marks.append(found)
            held = ", ".join(
                f"{name} {mib(found[name]):.1f}" for name in found if name not in ("made", "rows")
            )
            print(f"{one.method.id}: {made} tokens, {found['rows']} rows, MiB: {held}", flush=True)
    return {f"memory_{one.method.id}": {"marks": marks}}


def alive() -> int:
    """Bytes of all tensors in this process that are no parameters."""
    gc.collect()
    return tensor_bytes([x for x in gc.get_objects() if type(x) is torch.Tensor])


def latency(words: Sequence[str], numbers: Numbers) -> dict[str, Any]:
    """Return percentiles of the steps of each method, in milliseconds."""
    names = (FULL, PLUS, f"{PLUS} method.smooth=true", "method=h2o")
    cells = {name: Decoder([*name.split(), "budget=512", *words]).read(numbers["prompt"]) for name in names}
    watch, found = in_turn(cells, numbers["steps"]), {}
    for name, one in cells.items():
        found[name] = {key: 1e3 * seconds for key, seconds in (watch.percentiles(name) or {}).items()}
        shown = ", ".join(f"{key} {value:.2f}" for key, value in found[name].items())
        found[name]["pruned"] = one.cache.evictor.meter.scored if one.cache.evictor else 0
        print(f"{name}: ms a step: {shown}; layers pruned: {found[name]['pruned']}", flush=True)
    return {"latency": found}


def throughput(words: Sequence[str], numbers: Numbers) -> dict[str, Any]:
    """Return the batch that fits, and its rate, for each method."""
    cells = {name: Decoder([*name.split(), "budget=256", *words]) for name in (FULL, PLUS)}
    timed, found = numbers["timed"], {}
    for name, one in cells.items():
        most = most_held(one, numbers["prompt"], numbers["new"])
        if most > numbers["bytes"]:
            raise UserError(f"one sequence of {name} holds {most} bytes: set bytes={most} or more")
        found[name] = {"sequence": most, "batch": numbers["bytes"] // most}
    for name, one in cells.items():
        one.read(numbers["prompt"] + max(0, numbers["new"] - timed) // 2, found[name]["batch"])
    watch = in_turn(cells, timed)
    for name, one in cells.items():
        row = found[name]
        row |= {"rate": watch.per_second(name, row["batch"] * timed), "held": one.held()}
        print(
            f"{name}: {mib(row['sequence']):.2f} MiB a sequence, batch {row['batch']},"
            f" {row['rate']:.1f} tokens/s, {mib(row['held']):.1f} MiB held behind the last of them"
        )
    ratio = {key: found[PLUS][key] / found[FULL][key] for key in ("batch", "rate")}
    print(f"ratio: {ratio['batch']:.2f} of batches, {ratio['rate']:.2f} of rates", flush=True)
    return {"throughput": {**found, "ratio": ratio}}


def most_held(one: Decoder, prompt: int, new: int) -> int:
    """Return the most bytes that one sequence held between two forwards."""
    most = one.read(prompt).held()
    with one.attached():
        for _ in range(new):
            one.step()
            most = max(most, one.held())
    return most


def session(words: Sequence[str], numbers: Numbers) -> dict[str, Any]:
    """Return how far each method came, and why it stopped."""
    found = {}
    for name in (FULL, PLUS):
        one, reason = Decoder([*name.split(), "budget=512", *words]), None
        try:
            talk(one, numbers)
        except UserError as error:
            reason = str(error)
        meter = one.cache.evictor and one.cache.evictor.meter
        found[name] = {"seen": one.cache.seen, "rows": one.rows(), "stopped": reason}
        end = f"stopped: {reason}" if reason else "finished"
        if meter:
            found[name]["next_position"] = position = int(one.cache.layers[-1].next_position)
            found[name]["rows_peak"] = meter.entries_peak
            end += f", next position {position}, {meter.entries_peak} rows at most"
        print(f"{name}: {one.cache.seen} tokens seen, {one.rows()} rows, {end}", flush=True)
    return {"session": found}


def talk(one: Decoder, numbers: Numbers) -> None:
    """Hold a session; UserError where it holds more than it may."""
    text = one.text()
    for turn in range(numbers["turns"]):
        heard = list(islice(text, numbers["heard"]))
        if not turn:
            one.encode([heard])
        with one.attached():
            if turn:
                one.feed([heard])
            refuse_more(one, numbers["bytes"])
            for _ in range(numbers["said"]):
                one.step()
                refuse_more(one, numbers["bytes"])


def refuse_more(one: Decoder, most: int) -> None:
    """Raise UserError when more than `most` bytes are held."""
    if one.held() > most:
        raise UserError(
            f"{mib(one.held()):.1f} MiB are held, and bytes={most} allows {mib(most):.1f}: set more, or take"
            " a method that lets rows go"
        )


PARTS: dict[str, Callable[[Sequence[str], Numbers], dict[str, Any]]] = {
    part.__name__: part for part in (memory, latency, throughput, session, memory_of)
}


def main(arguments: Sequence[str]) -> int:
    """Run the parts that are named."""
    numbers, others = numbers_of(arguments, NUMBERS)
    parts = [word for word in others if "=" not in word]
    words = [word for word in others if "=" in word]
    if not parts or not set(parts) <= set(PARTS):
        raise UserError(f"{' '.join(parts) or 'nothing'} names no part: name some of {', '.join(PARTS)}")
    [run] = settings_of(["logger=none", *words])
    folder = run.output_dir / "decode_bench" / run.model.label
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        for name, found in PARTS[part](words, numbers).items():
            facts = {"words": list(arguments), "threads": torch.get_num_threads(), **found}
            (folder / f"{name}.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"decode_bench: {error}")
