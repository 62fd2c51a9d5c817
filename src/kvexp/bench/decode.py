"""Greedy decoding behind a long context: tokens a second, beside transformers' `generate` and kvpress.

    python -m kvexp.bench decode [methods=full,snapkv,knorm,streaming_llm] [context=4k] [budget=1k] [new=32]
        [repeats=5] [compiled=true] [against=kvpress] [environment=FOLDER] [threads=1] [key=value ...]

A block makes `new` tokens, one sequence, none ends it. Sides take turns, block by block, after a warm-up:

    NAME            `QueryBatch.generate` on a fork of the context's cache: `full`, and methods at `budget`
    NAME compiled   the same with everything between two attentions compiled (compiled=true)
    generate        transformers' own on a DynamicCache with the whole context, on the model without a method
    kvpress NAME    kvpress's own loop, in its own environment (FOLDER, or one made on first use in the user's
                    cache), which decodes behind the rows that its press kept of the context
    weights         the products of one token with every weight, alone: what a step cannot be faster than

Times are the process's own on a CPU with one thread, so that other processes disturb them little, and wall
time elsewhere. Printed: medians over blocks of tokens a second and of the ratio of times to the side that
each is held against, with the least and the most, and the share of a step's time that reading the weights
is. `equal` says that the tokens of a block were those of `generate` on the same cache. Prefill and
compression are timed once.

Other words are those of `python -m kvexp`. JSON goes to OUTPUT_DIR/bench/decode/MODEL.json.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from kvexp.bench.decoder import Decoder, checked, numbers_of
from kvexp.bench.kvpress import default_folder, environment, kvpress
from kvexp.bench.theirs import NEVER, PRESSES
from kvexp.bench.turns import spread, taken, timed, written
from kvexp.errors import UserError
from kvexp.prompt import Context
from kvexp.tasks.batch import QueryBatch

WORDS = {"methods": "full,snapkv,knorm,streaming_llm", "compiled": "false", "against": "", "environment": ""}
NUMBERS = {"context": 4096, "budget": 1024, "new": 32, "repeats": 5, "threads": 1}


class Ours:
    """One method of ours on the prompt."""

    def __init__(self, words: Sequence[str], prompt: Sequence[int], new: int) -> None:
        self.one, self.prompt, self.new = Decoder(words), list(prompt), new
        model, one = self.one.model, self.one
        context = Context((), (tuple(self.prompt[:-1]),))
        self.prefill, self.cache = timed(
            lambda: one.method.encode(model, [context], one.memory, one.settings.budget)
        )

    def block(self, compiled: bool) -> tuple[float, list[int]]:
        """Make `new` tokens on a fork; return the seconds and the tokens."""

        def run() -> list[int]:
            batch = QueryBatch(self.one.model, self.cache, [self.prompt[-1:]])
            return batch.generate(self.new, lambda made: None, compiled=compiled)[0][0]

        with self.one.attached():
            return timed(run)

    def seconds(self, compiled: bool) -> float:
        """The seconds of a block."""
        return self.block(compiled)[0]

    def generated(self) -> list[int]:
        """What transformers' `generate` makes on a fork, with the method attached."""
        with self.one.attached():
            return generate(self.one.model, self.prompt, self.cache.fork(), self.new)


def generate(model: Any, prompt: Sequence[int], cache: Any, new: int) -> list[int]:
    """Greedy tokens of transformers' `generate`; the cache has seen all of the prompt but its last token."""
    ids = torch.tensor([list(prompt)], device=model.device)
    choices = {"do_sample": False, "eos_token_id": NEVER, "pad_token_id": 0}
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=new, **choices
    )
    return output[0, len(prompt) :].tolist()


def stock(full: Ours) -> float:
    """The seconds of a block of `generate` on a cache of transformers; filling that is not timed."""
    from transformers import DynamicCache

    cache: Any = DynamicCache()
    for index, layer in enumerate(full.cache.layers):
        cache.update(layer.keys.clone(), layer.values.clone(), index)
    return timed(partial(generate, full.one.model, full.prompt, cache, full.new))[0]


def weights(model: Any, new: int) -> float:
    """Seconds in which each weight is multiplied with one token, `new` times."""
    read = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    tokens = {w.shape[1]: torch.randn(1, 1, w.shape[1], dtype=w.dtype, device=w.device) for w in read}

    def run() -> None:
        for _ in range(new):
            for weight in read:
                torch.nn.functional.linear(tokens[weight.shape[1]], weight)

    return timed(torch.no_grad()(run))[0]


def sides_of(cells: dict[str, Ours], compiled: bool, ask: Any) -> dict[str, Callable[[], float]]:
    """Every side by its name: a function that runs a block and returns its seconds."""
    sides: dict[str, Callable[[], float]] = {}
    for name, cell in cells.items():
        sides[name] = partial(cell.seconds, False)
        if compiled:
            sides[f"{name} compiled"] = partial(cell.seconds, True)
        if name == "full":
            sides["generate"] = partial(stock, cell)
        elif ask and name in PRESSES:
            sides[f"kvpress {name}"] = partial(ask, name, "seconds")
    one = next(iter(cells.values()))
    return {**sides, "weights": partial(weights, one.one.model, one.new)}


def rival_of(name: str, sides: Sequence[str]) -> str | None:
    """The side that a side of ours is held against."""
    method = name.split()[0]
    rival = "generate" if method == "full" else f"kvpress {method}"
    return rival if rival in sides and name != rival else None


def measured(sides: dict[str, Callable[[], float]], numbers: dict[str, int]) -> dict[str, Any]:
    """Run all sides in turn, one block each to warm up; return and print what each took."""
    seconds, found = taken(sides, numbers["repeats"]), {}
    for name, took in seconds.items():
        row: dict[str, Any] = {"seconds": took, "tokens_per_s": spread([numbers["new"] / s for s in took])}
        row["of_weights"] = spread([w / s for w, s in zip(seconds["weights"], took, strict=True)])
        line = f"{name:24} " + "{:6.1f} ({:.1f}-{:.1f}) tokens/s".format(*row["tokens_per_s"])
        line += f", reading the weights is {row['of_weights'][0]:.0%}"
        rival = rival_of(name, list(sides))
        if rival:
            row["times"] = spread([r / s for r, s in zip(seconds[rival], took, strict=True)])
            line += ", {:.2f} ({:.2f}-{:.2f}) times ".format(*row["times"]) + rival
        found[name] = row
        print(line, flush=True)
    return found


def chosen_of(words: Sequence[str], known: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return (`known` with the values that `words` give them, the other words)."""
    given = {key: value for key, _, value in (word.partition("=") for word in words) if key in known}
    return known | given, [word for word in words if word.partition("=")[0] not in known]


def main(arguments: Sequence[str]) -> int:
    """Measure, print and write JSON."""
    numbers, others = numbers_of(arguments, NUMBERS)
    chosen, words = chosen_of(others, WORDS)
    if chosen["against"] not in ("", "kvpress"):
        raise UserError(f"against={chosen['against']} is not known: write against=kvpress, or leave it out")
    if chosen["compiled"] not in ("true", "false"):
        raise UserError(f"compiled={chosen['compiled']} says neither: write compiled=true, or leave it out")
    each = {}
    for name in chosen["methods"].split(","):
        budget = "full" if name == "full" else str(numbers["budget"])
        each[name] = [f"method={name}", f"budget={budget}", *words]
    run = checked("decode", words, *each.values())
    torch.set_num_threads(numbers["threads"])
    python = None
    if chosen["against"]:
        python = environment(Path(chosen["environment"] or default_folder()).absolute())
    prompt = list(islice(Decoder(["method=full", *words]).text(), numbers["context"]))
    cells, found, compiled = {}, {}, chosen["compiled"] == "true"
    for name, own in each.items():
        cells[name] = cell = Ours(own, prompt, numbers["new"])
        found[name] = {"prefill": cell.prefill, "equal": cell.block(False)[1] == cell.generated()}
        if compiled:
            found[name]["equal_compiled"] = cell.block(True)[1] == cell.generated()
        print(f"{name}: {found[name]}", flush=True)
    with ExitStack() as stack:
        ask = None
        if python is not None:
            ask = stack.enter_context(rival(python, next(iter(cells.values())).one.model, numbers, prompt))
            for name in set(cells) & set(PRESSES):
                found[name]["prefill_kvpress"] = ask(name, "prefill")
        sides = measured(sides_of(cells, compiled, ask), numbers)
    report = {**numbers, "words": list(arguments), "methods": found, "sides": sides}
    written(run, "decode", report | {"load": os.getloadavg()})
    return 0


@contextmanager
def rival(
    python: Path, model: Any, numbers: dict[str, int], prompt: list[int]
) -> Iterator[Callable[[str, str], Any]]:
    """Let kvpress serve the same model and prompt; see `kvpress`."""
    with tempfile.TemporaryDirectory(prefix="kvexp-") as folder:
        model.save_pretrained(folder)
        facts = {**numbers, "prompt": prompt, "dtype": str(model.dtype).partition(".")[2]}
        with kvpress(Path(folder), python, facts) as ask:
            yield ask
