"""What many tests share: tiny models, prompts, a calibration without Lightning, and a padded forward."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kvexp import tiny
from kvexp.prompt import Context
from kvexp.stats.shares import WHOLE

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma3_text",
    "gpt_oss",
    "phi3",
    "deepseek_v3",
    "glm4_moe_lite",
)
"""Model types that the contracts of every method are tested on."""
PRESETS = Path(__file__).parent / "presets"
PRESET_NAMES = tuple(f"preset:{path.stem}" for path in sorted(PRESETS.glob("*.json")))
"""The architectures of the papers' models, built from their real configurations cut to two layers."""


def model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny random model of a family, or "preset:<name>" cut to two layers; shared, so tests leave it as
    it is."""
    return _model(family, dtype)  # one object, whether the dtype is named or not


@cache
def _model(family: str, dtype: torch.dtype) -> Any:
    if family.startswith("preset:"):
        facts = json.loads((PRESETS / f"{family.removeprefix('preset:')}.json").read_text(encoding="utf-8"))
        built = tiny.reduced(facts).to(dtype)
    else:
        built = tiny.build(family).to(dtype)
    if dtype == torch.float64:
        built.set_experts_implementation("eager")  # the grouped product of all experts knows no float64
    return built


def tokens(n: int, seed: int = 0) -> tuple[int, ...]:
    """Random byte tokens."""
    numbers = random.Random(seed)
    return tuple(numbers.randrange(tiny.VOCABULARY - 3) for _ in range(n))


def context(chunks: int = 6, length: int = 7, header: int = 3, seed: int = 1) -> Context:
    """A context of a header and equal chunks."""
    ids = tokens(header + chunks * length, seed)
    return Context(
        ids[:header], tuple(ids[header + i * length : header + (i + 1) * length] for i in range(chunks))
    )


QUERIES = [tokens(n, seed=100 + n) for n in (5, 9, 2)]


class Calibration:
    """The protocol of `kvexp.methods.base.Calibration`, run in a plain loop."""

    def __init__(
        self, context: Context, traces: Sequence[Sequence[int]], folder: Path, seed: int = 0
    ) -> None:
        self.context, self.traces, self.folder, self.seed = context, list(traces), folder / "part", seed
        self.batch_size = 2

    def collect(self, start: Any, items: Sequence[Any], what: str) -> list[Path]:
        part = start(self.folder)
        with torch.no_grad():
            for at in range(0, len(items), self.batch_size):
                part(list(items[at : at + self.batch_size]))
        part.close()
        return self.parts()

    def spread(self, keys: Any, build: Any, what: str) -> dict[int, Any]:
        return {key: build(key, WHOLE) for key in keys}

    def parts(self) -> list[Path]:
        return [self.folder]


@torch.no_grad()
def plain_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits [T, V] of an ordinary forward without any cache of ours."""
    return model(torch.tensor([list(ids)])).logits[0]
