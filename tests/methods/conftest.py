"""A memory made on a tiny model with given knobs, and what is asked of it in several tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import helpers
from kvexp.budget import Budget
from kvexp.measure.state_error import StateErrorMeter
from kvexp.methods.memory.asm import ASM
from kvexp.methods.memory.collect import encode_chunks, forward
from kvexp.methods.memory.lookup import LayerLookup
from kvexp.methods.memory.states import LayerMemory, StateMemory
from kvexp.prompt import Context
from kvexp.stats.samples import SampleStore
from kvexp.tasks.batch import QueryBatch


@dataclass
class Prepared:
    """A memory with everything that it was made from."""

    method: ASM
    model: Any
    context: Context
    memory: StateMemory
    samples: SampleStore

    def cache(self, method: ASM | None = None) -> Any:
        """The cache that stands for the context."""
        return (method or self.method).encode(self.model, self.context, self.memory)

    def logits(self, queries: Sequence[Sequence[int]], cache: Any = None) -> torch.Tensor:
        """Next-token logits [B, V] of queries on the memory."""
        with self.method.attach(self.model):
            return QueryBatch(self.model, cache or self.cache(), queries).logits

    def lookup(self, layer: int) -> LayerLookup:
        """Lookups in one layer."""
        return LayerLookup(self.memory.layers[layer], self.model, layer, self.method, {})

    def errors(self, queries: Sequence[Sequence[int]]) -> StateErrorMeter:
        """Compare the memory's attention with the exact one on queries that run over the whole context."""
        meter = StateErrorMeter({layer: self.lookup(layer) for layer in self.memory.layers})
        [cache] = encode_chunks(self.method, self.model, self.context, count=1)
        fork = cache.fork()
        fork.observe(meter)
        with self.method.attach(self.model), torch.no_grad():
            forward(self.model, fork, queries)
        return meter

    def layers(self) -> list[LayerMemory]:
        """The layers' memories in order."""
        return list(self.memory.layers.values())


@pytest.fixture
def prepared(tmp_path: Path) -> Callable[..., Prepared]:
    """Make a memory: prepared(traces, budget, family=..., model=..., context=..., seed=..., **knobs)."""
    numbers = itertools.count()

    def make(
        traces: Sequence[Sequence[int]],
        budget: int | None,
        family: str = "llama",
        model: Any = None,
        context: Context | None = None,
        seed: int = 0,
        **knobs: Any,
    ) -> Prepared:
        method = ASM(**{"samples": "float32", **knobs})
        model = model or helpers.model(family)
        context = helpers.context() if context is None else context
        folder = tmp_path / f"memory-{next(numbers)}"
        calibration = helpers.Calibration(context, traces, folder, seed)
        memory = method.prepare(model, calibration, Budget(budget))
        return Prepared(method, model, context, memory, SampleStore.merge(calibration.parts()))

    return make


@pytest.fixture(scope="session")
def llama64() -> Any:
    """A tiny llama that computes in float64 throughout: its norms and rotary tables are float32 otherwise."""
    from kvexp import tiny

    class Norm(torch.nn.Module):
        def __init__(self, old: Any) -> None:
            super().__init__()
            self.weight, self.eps = old.weight, old.variance_epsilon

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()

    class Rotary(torch.nn.Module):
        attention_scaling = 1.0

        def __init__(self, dim: int, base: float) -> None:
            super().__init__()
            self.frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)

        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            angles = position_ids.double()[..., None] * self.frequencies
            angles = torch.cat([angles, angles], dim=-1)
            return angles.cos(), angles.sin()

    model: Any = tiny.build("llama").double()
    for layer in model.model.layers:
        layer.input_layernorm = Norm(layer.input_layernorm)
        layer.post_attention_layernorm = Norm(layer.post_attention_layernorm)
    model.model.norm = Norm(model.model.norm)
    model.model.rotary_emb = Rotary(model.config.head_dim, model.config.rope_parameters["rope_theta"])
    model.set_attn_implementation("sdpa")  # eager attention has its softmax in float32
    return model
