"""Run an eviction method on a tiny model and hold what it keeps against a slow reference.

Every layer's evictor is watched: an `Event` holds what the layer knew right after it attended (rotated
queries of the forward, all rows as plain lists of one sequence and head) and which positions it kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import helpers
from kvexp.attention.function import Call, Padding
from kvexp.attention.rope import rotate
from kvexp.cache.evicting import EvictingLayer
from kvexp.cache.kv_cache import KVCache
from kvexp.methods.eviction import evictor as evictor_module
from kvexp.methods.eviction.base import EvictionMethod
from kvexp.methods.eviction.evictor import MethodEvictor
from kvexp.tasks.batch import QueryBatch


@dataclass
class Event:
    """One layer (`place` among `n_layers` that evict) after one forward, for one sequence.

    queries [Hq, T, D]: the real queries of this forward, `query_positions` [T] theirs. `keys[h]` [S, D],
    `values[h]`, `positions[h]`: the rows of KV head h before anything left, real ones only, in order.
    `kept[h]`: the positions that head h holds afterwards. `evicts`: whether the layer compacted it.
    `upcoming`: the position of the next token. `reading`: a part of the prompt was read.
    """

    forward: int
    place: int
    n_layers: int
    queries: torch.Tensor
    query_positions: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    positions: list[list[int]]
    kept: list[list[int]]
    scale: float
    upcoming: int
    reading: bool
    memory: Any = None
    queries_pre: torch.Tensor | None = None  # the same before rotary embedding, where the method taps them
    evicts: bool = field(init=False)

    def __post_init__(self) -> None:
        self.evicts = self.kept != self.positions

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.queries.shape[0] // len(self.keys)

    def logits(self, head: int) -> torch.Tensor:
        """Scaled causal scores [T, S] of query head `head`, in float32, -inf for rows that come later."""
        kv = head // self.group
        scores = self.queries[head].float() @ self.keys[kv].float().T * self.scale
        later = torch.tensor(self.positions[kv])[None] > torch.tensor(self.query_positions)[:, None]
        return scores.masked_fill(later, -torch.inf)

    def probabilities(self, head: int) -> torch.Tensor:
        """Softmax of `logits`, [T, S]."""
        return self.logits(head).softmax(-1)


class Watch:
    """Records the events of every sequence of a cache and of the forks that a run makes of it."""

    def __init__(self) -> None:
        self.events: list[dict[tuple[int, int], Event]] = []  # one a sequence, by (forward, place)
        self.before: dict[int, Any] = {}
        self.forward = 0

    def follow(self, evictor: Any) -> None:
        """Watch an evictor."""
        act, finish = evictor._act, evictor._finish

        def acting(place: int, layer: Any, call: Any) -> None:
            stored = [s.unpack() for s in layer.sources if hasattr(s, "unpack")]
            own = [layer.held().each(torch.clone)] if layer.rows else []  # rows may leave in place
            reading = evictor.phase == "prefill"
            act(place, layer, call)
            self.before[place] = ([*stored, *own], call, layer, reading)

        def finishing() -> None:
            finish()
            for place, (parts, call, layer, reading) in self.before.items():
                self._note(place, len(evictor.layers), parts, call, layer, reading, evictor.memory)
            self.before = {}
            self.forward += 1

        evictor._act, evictor._finish = acting, finishing

    def _note(self, place, n, parts, call, layer, reading, memory) -> None:  # type: ignore[no-untyped-def]
        batch, length = call.query.shape[0], call.query.shape[2]
        real = call.padding.at(layer.q_slots)
        after = [s.unpack() for s in layer.sources if hasattr(s, "unpack")]
        after += [layer.held()] if layer.rows else []
        while len(self.events) < batch:
            self.events.append({})
        for b in range(batch):
            mine = torch.ones(length, dtype=torch.bool) if real is None else real[b]
            at = layer.q_positions.expand(batch, -1)[b][mine].tolist()
            if not at:
                continue
            rows = [_rows(parts, b, h) for h in range(layer.keys.shape[1])]
            kept = [_rows(after, b, h)[2] for h in range(layer.keys.shape[1])]
            self.events[b][self.forward, place] = Event(
                self.forward,
                place,
                n,
                call.query[b][:, mine],
                at,
                [r[0] for r in rows],
                [r[1] for r in rows],
                [r[2] for r in rows],
                kept,
                call.scale,
                at[-1] + 1,
                reading,
                memory,
                None if call.query_pre is None else call.query_pre[b][:, mine],
            )


def _rows(parts: Sequence[Any], b: int, h: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    keys, values, positions = [], [], []
    for part in parts:
        i = b if part.keys.shape[0] > 1 else 0
        mask = part.mask()[i, h]
        keys.append(part.keys[i, h][mask])
        values.append(part.values[i, h][mask])
        positions += part.positions[i, h][mask].tolist()
    return torch.cat(keys), torch.cat(values), positions


Reference = Callable[[list[Event]], Any]
"""Given the events of one sequence up to a forward (in order of forward and layer), the last of which evict,
returns for each of the last forward's events the kept positions of each head."""


def watched(
    method: EvictionMethod,
    family: str,
    prompts: Sequence[Sequence[int]],
    budget: int,
    new_tokens: int,
    dtype: torch.dtype = torch.float32,
    memory: Any = None,
) -> list[list[Event]]:
    """Encode prompts as one batch, decode greedily, and return each sequence's events in order."""
    model = helpers.model(family, dtype)
    watch = Watch()
    plain = method.encode

    class Followed(MethodEvictor):
        def bind(self, cache: Any) -> None:
            super().bind(cache)
            for name in ("_act", "_finish"):
                self.__dict__.pop(name, None)
            watch.follow(self)

    evictor_module.MethodEvictor = Followed  # type: ignore[misc]
    try:
        contexts = [helpers.Context((), (tuple(p[:-1]),)) for p in prompts]
        cache = plain(model, contexts, memory, budget)
        with method.attach(model, memory):
            batch = QueryBatch(model, cache, [p[-1:] for p in prompts])
            if new_tokens:
                batch.generate(new_tokens, lambda made: None)
    finally:
        evictor_module.MethodEvictor = MethodEvictor  # type: ignore[misc]
    return [[events[key] for key in sorted(events)] for events in watch.events]


def hold(events: list[Event], reference: Reference) -> int:
    """Assert that every eviction of a sequence kept what the reference keeps; return how many there were."""
    count = 0
    for forward in sorted({event.forward for event in events}):
        current = [event for event in events if event.forward == forward]
        if not any(event.evicts for event in current):
            continue
        so_far = [event for event in events if event.forward <= forward]
        for event, kept in zip(current, reference(so_far), strict=True):
            if event.evicts:
                assert event.kept == [sorted(positions) for positions in kept], (forward, event.place)
                count += 1
    return count


def top(scores: torch.Tensor, positions: list[int], n: int, always: Sequence[int] = ()) -> list[int]:
    """The positions of the n best scores [S], those in `always` first, ties to the lower index."""
    order = sorted(range(len(positions)), key=lambda i: (positions[i] not in always, -float(scores[i]), i))
    return sorted(positions[i] for i in order[:n])


PROMPTS = [helpers.tokens(n, seed=7 + n) for n in (40, 29, 35)]
each_setting = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def by_hand(
    method: EvictionMethod,
    steps: Sequence[tuple[Any, Any, Any]],
    budget: int,
    memory: Any = None,
    scale: float = 1.0,
) -> list[list[int]]:
    """Run one layer on given tensors, without a model; return the kept positions of each KV head.

    A step is (queries [Hq, T, D], keys [H, T, D], values [H, T, Dv]), nested lists or tensors; the first step
    is the prompt, the later ones are decoded.
    """
    layer = layer_by_hand(method, steps, budget, memory, scale)
    return [_rows([layer.held()], 0, h)[2] for h in range(layer.keys.shape[1])]


def layer_by_hand(
    method: EvictionMethod,
    steps: Sequence[tuple[Any, Any, Any]],
    budget: int,
    memory: Any = None,
    scale: float = 1.0,
    model: Any = None,
) -> EvictingLayer:
    """Do what `by_hand` does and return the layer.

    With `model`, queries and keys are given before RoPE, and rotated as in its first layer; without, nothing
    rotates.
    """
    layer = EvictingLayer(0)
    evictor = MethodEvictor(method, budget, memory, model=model)
    KVCache([layer], evictor=evictor)
    module: Any = torch.nn.Module()
    module.layer_idx = 0
    for number, step in enumerate(steps):
        before, key, value = (torch.as_tensor(x, dtype=torch.float32)[None] for x in step)
        query, length = before, before.shape[2]
        if model is not None:
            positions = torch.arange(layer.seen, layer.seen + length)
            query, key = (rotate(model, x, positions, 0, scaled=True) for x in (query, key))
        if number == 0:
            evictor.reading(last=True)
        keywords: dict[str, Any] = {}
        key, value = layer.update(key, value, kwargs=keywords)
        call = Call(module, query, key, value, scale, None, Padding(None), before, False)
        layer.attend(call)
        layer.after(call)
        if number == 0:
            evictor.read()
    layer.own()
    return layer
