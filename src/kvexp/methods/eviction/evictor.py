"""When rows leave: the part of eviction that is the same for every method.

An evictor belongs to one cache (forks have their own) and follows it through three phases: the prompt is
being read (`prefill`), has been read but its end is still to come (`pending`: a compression that waits for
the query), and `decode`. Each layer hands itself over right after it attended.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvexp.attention.function import Call
from kvexp.cache.evicting import EvictingLayer
from kvexp.cache.window import Window
from kvexp.methods.eviction.due import Targets, due
from kvexp.methods.eviction.meter import Meter
from kvexp.methods.eviction.scale import Scale
from kvexp.methods.eviction.selection import choose
from kvexp.methods.eviction.tally import Tally
from kvexp.methods.eviction.view import View

if TYPE_CHECKING:
    from kvexp.cache.kv_cache import KVCache
    from kvexp.methods.eviction.base import EvictionMethod


class MethodEvictor:
    """Applies an eviction method to the full-attention layers of a cache."""

    def __init__(
        self,
        method: EvictionMethod,
        rows: int | None,
        memory: Any = None,
        meter: Meter | None = None,
        model: Any = None,
    ) -> None:
        self.method, self.rows, self.memory, self.model = method, rows, memory, model
        self.meter = meter or Meter()
        self.phase = "pending"
        self.closing = False  # the forward that runs now ends the prompt
        self.prompt: torch.Tensor | None = None  # positions below it are the prompt's, [1 or B]
        self.tally = Tally(0)
        self.waiting: list[tuple[View, torch.Tensor, Targets]] = []  # scores that wait for the other layers
        self.dropped = 0  # layers that lost, in this forward, as many rows as it brought, and by `drop`
        self.level = 0  # tokens of the latest forward, where all layers did
        self.layers: list[EvictingLayer] = []
        self.counters: dict[str, int] = {}

    @property
    def wants_lse(self) -> bool:
        """Whether the method reads attention probabilities."""
        return self.rows is not None and self.method.observes

    @property
    def wants_rows(self) -> bool:
        """Whether the method reads all rows at every step."""
        return self.wants_lse

    def bind(self, cache: KVCache) -> None:
        """Follow `cache` from now on."""
        self.layers = [layer for layer in cache.layers if isinstance(layer, EvictingLayer)]
        self.counters = cache.counters
        self.scale = Scale(cache.layers)
        for layer in self.layers:
            layer.evictor = weakref.proxy(self)  # the cache has it: no circle, so that rows go at once
        if not self.tally.totals:
            self.tally = Tally(len(self.layers))
        self._places = {id(layer): place for place, layer in enumerate(self.layers)}
        self._indices = [at for at, layer in enumerate(cache.layers) if isinstance(layer, EvictingLayer)]

    def fork(self) -> MethodEvictor:
        """Return an evictor in the same state, for a fork of the cache."""
        twin = copy.copy(self)
        twin.tally, twin.waiting, twin.layers = self.tally.fork(), [], []
        return twin

    def usage(self) -> dict[str, Any]:
        """Return what a record says of the rows held: all of them where rows also leave while decoding."""
        summary = self.meter.summary()
        if self._evicts_later:
            return summary
        return {name: summary[name] for name in ("storage", "entries_peak_prompt", "bytes_peak_prompt")}

    @property
    def _evicts_later(self) -> bool:
        """Whether rows also leave while decoding; where they do not, only the prompt's peak is told."""
        return self.rows is not None and self.method.during("decode").interval is not None

    def select(self, indices: torch.Tensor) -> None:
        """Follow the cache to the sequences `indices` of its batch."""
        self.tally.select(indices.tolist())
        if self.prompt is not None and self.prompt.shape[0] > 1:
            self.prompt = self.prompt.index_select(0, indices.to(self.prompt.device))

    def reading(self, last: bool) -> None:
        """The next forward reads a part of the prompt, the last one or not."""
        self.phase, self.closing = "prefill", last and not self.method.during("prefill").query_aware

    def read(self) -> None:
        """The prompt has been read; what waits for the query is still to come."""
        self.phase = "pending" if self.method.during("prefill").query_aware else "decode"

    def after(self, layer: EvictingLayer, call: Call) -> None:
        """Follow a layer that has just attended, and evict where that is due."""
        place = self._places[id(layer)]
        if place == 0:
            self.scale.start(call.query.shape[2])
            self.dropped = 0
        self._count(place, layer, call)
        if self.rows is not None:
            self._act(place, layer, call)
        if place == len(self.layers) - 1:
            self._finish()

    def _act(self, place: int, layer: EvictingLayer, call: Call) -> None:
        if self.method.window_size and self._goes_on:
            layer.queries = Window.grown(layer.queries, call, layer.q_slots, self.method.window_size)
        if self.method.observes or self.method.follows:
            self.method.observe(View(layer, call, self, place))
        targets = due(self, place, layer.keys.shape[1])
        if targets is None:
            return
        if self.phase == "decode" and self.method.oldest_first and (layer.drops or layer.move_in()):
            self._drop(place, layer, targets[0], call.query.shape[2])
            return
        layer.own()
        view = View(layer, call, self, place)
        method = self.method.during(self.phase)
        scores = method.combine(method.score(view), view)
        if method.scope == "model":
            self.waiting.append((view, scores, targets))
        else:
            self._evict(view, scores, targets, method)

    def _count(self, place: int, layer: EvictingLayer, call: Call) -> None:
        batch, length = call.query.shape[0], call.query.shape[2]
        heads = layer.keys.shape[1]
        real = call.padding.real(layer.seen - length, layer.seen) or [length] * batch
        self.tally.arrive(place, heads, real)
        self.meter.hold(self.tally.rows(place, heads), self.phase != "decode")

    def _evict(self, view: View, scores: torch.Tensor, targets: Targets, method: EvictionMethod) -> None:
        always = method.always(view)
        rows = method.allot(scores, targets, view, always)
        totals, heads = self.tally.totals[view.index], view.heads
        acts = [target * heads < total for target, total in zip(targets, totals, strict=True)]
        if view.valid is not None and not all(acts):  # a sequence whose turn has not come keeps every row
            held = view.valid.sum(-1).tolist()
            rows = [some if act else every for some, every, act in zip(rows, held, acts, strict=True)]
        self._keep(view.index, scores, rows, always)
        if self.phase == "decode":
            done = self.tally.compressed[view.index]
            self.tally.compressed[view.index] = [old or act for old, act in zip(done, acts, strict=True)]
        method.evicted(view)

    @property
    def _goes_on(self) -> bool:
        """Whether rows may still leave, or the method looks at each forward."""
        method = self.method.during(self.phase)
        return self.phase != "decode" or method.interval is not None or method.observes or method.follows

    def _drop(self, place: int, layer: EvictingLayer, target: int, new: int) -> None:
        """Let the oldest rows behind the sinks go, all but `target` rows in all."""
        count, batch = layer.rows - target, len(self.tally.totals[place])
        known = 0 < new <= self.level  # the latest forward, which was weighed, held as much at each moment
        if not known:
            self.meter.weigh(self.scale.before(self._indices[place]), prompt=False)
        layer.drop(self.method.sinks, count)
        if not known:
            self.scale.after(self._indices[place])
        self.meter.scored += 1
        self.meter.note_storage(False, False)
        self.dropped += count == new
        self.tally.compressed[place] = [True] * batch
        self._left(place, [layer.keys.shape[1] * layer.rows] * batch)

    def _left(self, place: int, kept: list[int]) -> None:
        """Note how many rows each sequence still has in a layer, and count those that left."""
        gone = self.tally.leave(place, kept)
        self.counters["evicted"] = self.counters.get("evicted", 0) + gone

    def compress(self, scores: Sequence[torch.Tensor], rows: Sequence[list[list[int]]]) -> None:
        """Keep, between two forwards, `rows[layer][b][h]` rows: the best by each layer's scores [B, H, S]."""
        for place, layer in enumerate(self.layers):
            layer.own()
            self._keep(place, scores[place], rows[place], None)

    def _keep(
        self, place: int, scores: torch.Tensor, rows: list[list[int]], always: torch.Tensor | None
    ) -> None:
        layer, batch = self.layers[place], len(self.tally.totals[place])
        self.meter.scored += 1
        indices, counted = choose(scores, rows, layer.valid, always)
        ragged = any(len(set(of_heads)) > 1 for of_heads in rows)
        self.meter.note_storage(ragged, counted is not None)
        self.meter.weigh(self.scale.before(self._indices[place]), self.phase != "decode")
        layer.keep(indices, counted, ragged)
        self.scale.after(self._indices[place])
        if counted is None:
            kept = [indices.shape[1] * indices.shape[2]] * batch
        else:
            kept = counted.sum((1, 2)).tolist()
        self._left(place, kept)

    def _finish(self) -> None:
        """All layers have attended."""
        if self.waiting:
            method = self.method.during(self.phase)
            views, scores, targets = zip(*self.waiting, strict=True)
            for view, score, target in zip(
                views, method.across(list(scores), list(views)), targets, strict=True
            ):
                self._evict(view, score, target, method)
            self.waiting = []
        reading, between_chunks = self.phase != "decode", self.phase == "prefill" and not self.closing
        tokens = self.layers[-1].new_rows
        level = tokens if self.dropped == len(self.layers) else 0
        if not 0 < level <= self.level and (reading or self._evicts_later):
            self._weigh(reading)
        self.level = level
        if self.phase != "prefill":
            if self.prompt is None:
                self.prompt = self.layers[-1].next_position
            self.phase = "decode"
        self.closing = False
        if between_chunks:  # what is held there is the prompt's peak, which is counted apart
            return
        rows = [self.tally.rows(place, layer.keys.shape[1]) for place, layer in enumerate(self.layers)]
        self.meter.measure(rows)

    def _weigh(self, reading: bool) -> None:
        """Note the bytes held at the end of a forward; `reading`: which read a part of the prompt."""
        settled = not reading and any(map(any, self.tally.compressed))
        held = self.scale.end(0.0 if reading else self.meter.bytes_peak, settled)
        if held is None:
            return
        if reading:
            self.meter.weigh(held, prompt=True)
        if (
            not reading or self.closing or self.phase == "pending"
        ):  # the prompt ends: what is left of it counts
            self.meter.weigh(held, prompt=False)
