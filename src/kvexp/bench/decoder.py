"""What the scripts that measure decoding share: a cell that decodes, and their command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch

from kvexp.attention.options import Options, set_options
from kvexp.bench.turns import folder_of
from kvexp.cache.kv_cache import KVCache
from kvexp.calibration.prepare import draw_segments
from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.evaluation.memory import memory_for
from kvexp.measure.memory import tensor_bytes
from kvexp.measure.timing import Stopwatch
from kvexp.model import load_once
from kvexp.prompt import Context
from kvexp.schema import Settings

UNITS = " kMG"  # powers of 1,024
CORPUS = 4096  # tokens of text that prompts are cut from, again and again


class Decoder:
    """A cell of the command line that decodes greedily, a token a step, whatever the tokens are."""

    def __init__(self, words: Sequence[str]) -> None:
        [self.settings] = settings_of(["logger=none", *words])
        spec, self.method = self.settings.model, self.settings.method
        self.loaded = load_once(spec, needs_full_layer=self.method.needs_full_layer)
        self.model: Any = self.loaded.model
        set_options(self.model, Options(spec.attention, spec.prefill_chunk, spec.compiled))
        self.memory = memory_for(self.settings, self.loaded, None, None, Stopwatch())
        self.cache: KVCache
        self.logits: torch.Tensor

    def text(self) -> Iterator[int]:
        """Yield tokens of the calibration corpus without end."""
        spec = replace(self.settings.calibration, tokens=CORPUS)
        segments = draw_segments(spec, self.loaded, self.settings.data_dir)
        return cycle([token for segment in segments for token in segment])

    def attached(self) -> AbstractContextManager[None]:
        """Switch the model to the method."""
        return self.method.attach(self.model, self.memory)

    def read(self, length: int, count: int = 1) -> Decoder:
        """Encode `count` prompts of `length` tokens as one batch, but for the last token, which is fed."""
        text = self.text()
        return self.encode([list(islice(text, length)) for _ in range(count)])

    def encode(self, prompts: Sequence[Sequence[int]]) -> Decoder:
        """Read prompts of equal length."""
        contexts = [Context((), (tuple(prompt[:-1]),)) for prompt in prompts]
        self.cache = self.method.encode(self.model, contexts, self.memory, self.settings.budget)
        with self.attached():
            self.feed([prompt[-1:] for prompt in prompts])
        return self

    @torch.no_grad()
    def feed(self, tokens: Any) -> None:
        """Let the cache see tokens [B][T]; inside `attached`."""
        ids = torch.as_tensor(tokens, device=self.loaded.device)
        positions = torch.arange(self.cache.seen, self.cache.seen + ids.shape[1], device=ids.device)[None]
        output = self.model(ids, cache=self.cache, position_ids=positions, logits_to_keep=1)
        self.logits = output.logits[:, -1]

    def step(self) -> None:
        """Feed the most likely next token; inside `attached`."""
        self.feed(self.logits.argmax(-1, keepdim=True))

    def held(self) -> int:
        """Bytes of the storages behind the rows, and behind what the method notes of them."""
        return tensor_bytes([layer.tensors() for layer in self.cache.layers])

    def rows(self) -> int:
        """Rows per KV head of the fullest layer."""
        return max(self.cache.entries())


def in_turn(cells: Mapping[str, Decoder], steps: int) -> Stopwatch:
    """Let each cell make a step, `steps` times; return the lengths of steps under the names of the cells."""
    watch = Stopwatch(str(next(iter(cells.values())).loaded.device))
    for _ in range(steps):
        for name, one in cells.items():
            with one.attached(), watch.trace(name):
                one.step()
    return watch


def checked(part: str, words: Sequence[str], *cells: Sequence[str]) -> Settings:
    """Return the settings of `words`, once they, those of all cells, and where the part writes are right.

    Raises UserError, before anything is loaded or measured.
    """
    run, *_ = [settings_of(["logger=none", *some])[0] for some in (words, *cells)]
    folder_of(run.output_dir, part)
    return run


def numbers_of(arguments: Sequence[str], known: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
    """Return (`known` with the values that `arguments` give them, the other arguments).

    A value may end in k, M or G; UserError where it is no number.
    """
    numbers, others = dict(known), []
    for word in arguments:
        key, _, value = word.partition("=")
        if key not in known:
            others.append(word)
            continue
        unit = UNITS.find(value[-1:], 1)
        digits = value if unit < 0 else value[:-1]
        if not digits.isdecimal() or not int(digits):
            raise UserError(
                f"{word} is no number above 0: write {key}={known[key]}, with k, M or G behind it"
            )
        numbers[key] = int(digits) << 10 * max(0, unit)
    return numbers, others
