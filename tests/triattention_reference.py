"""TriAttention's choice once more: one sequence, one head, all offsets apart, from watched events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import helpers
from evict import Event, top
from kvexp.budget import Budget
from kvexp.methods.eviction.triattention import TriAttention
from kvexp.prompt import Context

SEGMENTS = [helpers.tokens(n, seed=300 + n) for n in (40, 64, 31)]


def statistics(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Query statistics of a tiny model on random text."""
    calibration = helpers.Calibration(Context((), ()), SEGMENTS, folder)
    return TriAttention().prepare(helpers.model(family, dtype), calibration, Budget(None))


class Slow:
    """A `Reference` for models without still numbers whose pairs are halves, such as llama and qwen3."""

    def __init__(self, method: TriAttention, family: str, budget: int, dtype: torch.dtype = torch.float32):
        self.method, self.budget = method, budget
        self.w = helpers.model(family, dtype).base_model.rotary_emb.inv_freq.double()

    def __call__(self, events: list[Event]) -> list[list[list[int]]]:
        last = [event for event in events if event.forward == events[-1].forward]
        always = [self.always(events, event) for event in last]
        ranks = [self.by_kv_head(events, event, kept) for event, kept in zip(last, always, strict=True)]
        if self.method.mode != "per_layer_perhead":
            together = torch.stack([torch.stack(heads) for heads in ranks])  # [L, H, S]
            joint = together.amax((0, 1)) if self.method.mode == "union" else together.mean(0)
            ranks = [list(joint.expand(together.shape[1:])) for _ in last]
        return [
            [
                top(rank, positions, self.budget, sorted(kept))
                for rank, positions in zip(heads, event.positions, strict=True)
            ]
            for heads, event, kept in zip(ranks, last, always, strict=True)
        ]

    def always(self, events: list[Event], event: Event) -> set[int]:
        """The positions that never leave."""
        method, end = self.method, event.upcoming
        kept = {*range(method.sinks), *range(max(0, end - method.recent), end)}
        prompts = [one.upcoming for one in events if not one.reading and one.forward < event.forward]
        if method.protect_prompt and prompts and prompts[0] < self.budget - method.recent:
            kept |= set(range(prompts[0]))
        return kept

    def by_kv_head(self, events: list[Event], event: Event, always: set[int]) -> list[torch.Tensor]:
        """How each KV head of a layer ranks its rows."""
        found = []
        for head, positions in enumerate(event.positions):
            free = [i for i, position in enumerate(positions) if position not in always]
            group = range(head * event.group, (head + 1) * event.group)
            scores = torch.stack([self.z(self.score(events, event, q), free) for q in group])
            joined = scores.amax(0) if self.method.group == "max" else scores.mean(0)
            if self.method.mix != "none":
                attended = torch.stack([self.attended(events, event, q) for q in group]).mean(0)
                pair = torch.stack([joined, self.z(attended, free)])
                joined = pair.amax(0) if self.method.mix_by == "max" else pair.mean(0)
            found.append(joined)
        return found

    def z(self, scores: torch.Tensor, free: list[int]) -> torch.Tensor:
        """z-scores over the rows that are free to leave."""
        among = scores[free]
        deviation = max(float(among.std(correction=0)), 1e-6)
        found = torch.zeros_like(scores)
        found[free] = (among - among.mean()) / deviation
        return found

    def score(self, events: list[Event], event: Event, head: int) -> torch.Tensor:
        """The score of each row for one query head, RoPE undone."""
        method, kv = self.method, head // event.group
        m, r, square = self.moments(events, event, head)
        positions = torch.tensor(event.positions[kv]).double()
        k = self.bands(event.keys[kv]) * torch.exp(-1j * positions[:, None] * self.w)
        sizes, distance = k.abs(), event.upcoming - positions
        total = torch.zeros(len(positions), dtype=torch.float64)
        ahead = [1 << i for i in range(method.max_offset.bit_length())]
        if method.offsets == "linear":
            ahead = [1 + i * method.max_offset // (len(ahead) - 1) for i in range(len(ahead))]
        if method.trig:
            d = torch.tensor(ahead).double()[:, None, None]
            if method.gain == "smooth":
                turned = m * torch.exp(1j * distance[:, None] * self.w) / (1 - 1j * self.w * d)
                found = (turned * k.conj()).real.sum(-1)  # [offsets, S]
            else:
                angles = self.w * (distance[:, None] + d) + m.angle() - k.angle()
                found = (m.abs() * sizes * angles.cos()).sum(-1)
            total += found.amax(0) if method.aggregate == "max" else found.mean(0)
        if method.norm == "variance":
            total += event.scale / 2 * (sizes.square() * (square - m.abs().square()) / 2).sum(-1)
        elif method.norm != "none":
            total += (sizes * (r - m.abs() if method.norm == "weighted" else r)).sum(-1)
        if method.value_norm:
            total += event.values[kv].double().norm(dim=-1).log() / event.scale
        return total

    def moments(self, events: list[Event], event: Event, head: int) -> Any:
        """Mean, mean size and mean square of one head's queries, moved by those that were decoded."""
        measured = event.memory.layers[event.place]
        found = [x[head].clone() for x in (measured.mean, measured.magnitude, measured.square)]
        if self.method.ema:
            for one in events:
                if one.place != event.place or one.reading:
                    continue
                for query, position in zip(one.queries[head], one.query_positions, strict=True):
                    q = self.bands(query[None])[0] * torch.exp(-1j * position * self.w)
                    new = (q, q.abs(), q.abs().square())
                    rate = self.method.ema
                    found = [(1 - rate) * old + rate * x for old, x in zip(found, new, strict=True)]
        return found

    def attended(self, events: list[Event], event: Event, head: int) -> torch.Tensor:
        """Attention for each query that could see a row: of the last ones, or of all since the row came."""
        kv = head // event.group
        mine = [one for one in events if one.place == event.place]
        if self.method.mix == "accumulated":
            total = dict.fromkeys(event.positions[kv], 0.0)
            for one in mine:
                sums = one.probabilities(head).double().sum(0).tolist()
                for position, value in zip(one.positions[kv], sums, strict=True):
                    if position in total:
                        total[position] += value
            return torch.tensor([total[p] / (event.upcoming - p) for p in event.positions[kv]])
        queries = torch.cat([one.queries[head] for one in mine])[-self.method.window :].float()
        asked = [p for one in mine for p in one.query_positions][-self.method.window :]
        total_of = torch.zeros(len(event.positions[kv]))
        for query, at in zip(queries, asked, strict=True):
            visible = torch.tensor(event.positions[kv]) <= at
            logits = (event.keys[kv].float() @ query * event.scale).masked_fill(~visible, -torch.inf)
            total_of += logits.softmax(0)
        seen_by = torch.tensor([sum(at >= p for at in asked) for p in event.positions[kv]])
        return (total_of / seen_by.clamp(min=1)).double()

    def bands(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors [n, D] as complex numbers [n, D / 2]."""
        left, right = x.double().chunk(2, dim=-1)
        return torch.complex(left, right)
