"""A slow reference of SnapKV's scores, one row at a time, for the methods that build on it."""

from __future__ import annotations

import math

from evict import Event
from kvexp.methods.eviction.snapkv import SnapKV

Numbers = list[float]


def latest(events: list[Event]) -> list[Event]:
    """The events of the last forward."""
    return [event for event in events if event.forward == events[-1].forward]


def window_rows(event: Event, method: SnapKV) -> range:
    """The positions of the window."""
    return range(event.upcoming - method.window, event.upcoming)


def snap_scores(events: list[Event], event: Event, method: SnapKV) -> list[Numbers]:
    """The score of each row of each KV head of `event`; those of the window are 0."""
    found = []
    for kv, positions in enumerate(event.positions):
        past = [i for i, position in enumerate(positions) if position not in window_rows(event, method)]
        heads = range(kv * event.group, (kv + 1) * event.group)
        logits = [window_logits(events, event, head, method.window) for head in heads]
        if method.merge == "logits":
            logits = [[merged(rows, method.group) for rows in zip(*logits, strict=True)]]
        attention = [mean_attention(rows, past if method.softmax == "past" else None) for rows in logits]
        if method.merge == "attention":
            attention = [merged(attention, method.group)]
        smooth = [pool([head[i] for i in past], method.kernel, method.pool) for head in attention]
        scores = merged(smooth, method.group)
        row = [0.0] * len(positions)
        for i, score in zip(past, scores, strict=True):
            row[i] = score
        found.append(row)
    return found


def window_logits(events: list[Event], event: Event, head: int, window: int) -> list[Numbers]:
    """Scaled scores of the latest queries of a query head, those of earlier forwards included."""
    mine = [one for one in events if one.place == event.place]
    queries = [
        (position, one.queries[head, t].double())
        for one in mine
        for t, position in enumerate(one.query_positions)
    ]
    kv = head // event.group
    keys, positions = event.keys[kv].double(), event.positions[kv]
    found = []
    for at, query in queries[-window:]:
        logits = (keys @ query * event.scale).tolist()
        seen = zip(logits, positions, strict=True)
        found.append([logit if position <= at else -math.inf for logit, position in seen])
    return found


def mean_attention(logits: list[Numbers], only: list[int] | None) -> Numbers:
    """The mean over queries of the softmax over the rows `only` (None: all)."""
    rows = range(len(logits[0]))
    total = [0.0] * len(rows)
    for query in logits:
        weights = [math.exp(query[i]) if only is None or i in only else 0.0 for i in rows]
        total = [t + w / sum(weights) for t, w in zip(total, weights, strict=True)]
    return [t / len(logits) for t in total]


def pool(scores: Numbers, kernel: int, how: str) -> Numbers:
    """The maximum of `kernel` scores around each, or their sum divided by `kernel`."""
    reach = kernel // 2
    around = [scores[max(0, i - reach) : i + reach + 1] for i in range(len(scores))]
    return [max(some) if how == "max" else sum(some) / kernel for some in around]


def merged(heads: list[Numbers], how: str) -> Numbers:
    """The mean or maximum over heads, row by row."""
    return [max(some) if how == "max" else sum(some) / len(some) for some in zip(*heads, strict=True)]
