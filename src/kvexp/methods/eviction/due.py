"""Whether rows have to leave a layer now, and how many stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvexp.methods.eviction.base import EvictionMethod
    from kvexp.methods.eviction.evictor import MethodEvictor

Targets = list[int]  # rows per KV head that each sequence may keep


def due(evictor: MethodEvictor, place: int, heads: int) -> Targets | None:
    """Return the rows per KV head that each sequence may keep now; None when nothing is due.

    `place` is that of the layer, with `heads` KV heads, among those that evict.
    """
    method, layers = evictor.method.during(evictor.phase), len(evictor.layers)
    assert evictor.rows is not None
    if evictor.phase == "decode":
        wanted = method.interval is not None
    elif evictor.phase == "prefill" and not evictor.closing:
        wanted = method.prefill == "chunks"
    else:
        wanted = method.prefill != "off"
    if not wanted:
        return None
    tally = evictor.tally
    totals, seen = tally.totals[place], tally.tokens[place]
    limits = [method.layer_rows(place, layers, evictor.rows, tokens) for tokens in seen]
    if evictor.phase == "decode":
        turn = -(-(place + 1) * (method.interval or 1) // layers)
        state = zip(totals, limits, seen, tally.latest, tally.compressed[place], strict=True)
        acts = [_is_due(method, turn, heads, *one) for one in state]
    else:
        acts = [total > heads * limit for total, limit in zip(totals, limits, strict=True)]
    if not any(acts):
        return None
    lengths = [-(-total // heads) for total in totals]
    return [limit if act else n for limit, act, n in zip(limits, acts, lengths, strict=True)]


def _is_due(
    method: EvictionMethod, turn: int, heads: int, total: int, limit: int, tokens: int, new: int, done: bool
) -> bool:
    """Whether a sequence of `tokens` evicts after this step of decoding, which brought `new` of them.

    `turn`: tokens until the layer's turn within an interval; `done`: the sequence has evicted while decoding.
    """
    interval = method.interval or 1
    if method.trigger == "length":
        passed = tokens // interval > (tokens - new) // interval
        return passed and total > heads * limit
    slack = interval
    if method.smooth and not done:  # layers take turns within an interval
        slack = turn
    return total >= heads * (limit + slack)
