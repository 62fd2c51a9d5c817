"""Two cases computed by hand from the method's formulas, and the knobs that make no sense."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kvexp.attention.function import Call, Padding
from kvexp.cache.dense import DenseLayer
from kvexp.cache.shared import SharedRows
from kvexp.cache.virtual import Virtual
from kvexp.errors import UserError
from kvexp.methods.memory.asm import ASM
from kvexp.methods.memory.build import LayerBuilder
from kvexp.methods.memory.grouping import Grouping
from kvexp.methods.memory.lookup import LayerLookup
from kvexp.methods.memory.states import LayerMemory
from kvexp.stats.samples import SampleStore

SCALE = 0.5
KEYS, VALUES = [(1.0, 0.0), (0.0, 2.0)], [(1.0, 0.0), (0.0, 3.0)]  # the prefix: two rows of one KV head


def dot(x, y):
    return sum(a * b for a, b in zip(x, y, strict=True))


def state(query):
    """(a, s) of one query over the two rows, as section 5.1 of the method defines them."""
    scores = [dot(query, key) * SCALE for key in KEYS]
    z = sum(math.exp(score) for score in scores)
    a = [sum(math.exp(x) * v[i] for x, v in zip(scores, VALUES, strict=True)) / z for i in range(2)]
    return a, math.log(z)


def call(queries: list, keys: Tensor, values: Tensor, dtype: torch.dtype) -> Call:
    """An attention call of one sequence: queries [Hq][T][D] before and after (no) rotation."""
    query = torch.tensor(queries, dtype=dtype)[None]
    module = SimpleNamespace(layer_idx=0)
    return Call(module, query, keys, values, SCALE, None, Padding(None), query, True)  # type: ignore[arg-type]


def collected(traces: list, folder, dtype: torch.dtype) -> SampleStore:
    """States of trace queries [n][Hq][D] over the prefix, taken by the code and checked by hand."""
    keys, values = (torch.tensor(x, dtype=dtype)[None, None] for x in (KEYS, VALUES))
    rows = SharedRows(keys, values, torch.arange(2), torch.arange(2)[None], (0, 2))
    layer = DenseLayer((rows,), 2)
    heads = len(traces[0])
    made = call([[trace[h] for trace in traces] for h in range(heads)], keys, values, dtype)
    a, s = rows.state(made, layer)
    for n, trace in enumerate(traces):
        for h, query in enumerate(trace):
            by_hand = state(query)
            torch.testing.assert_close(a[0, h, n].tolist(), by_hand[0], rtol=0, atol=1e-6)
            assert s[0, h, n].item() == pytest.approx(by_hand[1], abs=1e-6)
    store = SampleStore.create(folder, [0], {"q": (heads, 2), "a": (heads, 2), "s": (heads,)}, dtype)
    store.append(0, q=torch.tensor(traces, dtype=dtype), a=a[0].transpose(0, 1), s=s[0].T)
    return store


def answer(method: ASM, memory: LayerMemory, query: list, dtype: torch.dtype) -> Tensor:
    """The output [Hq, Dv] of one query token on the memory; its own row has key (1, 1) and value (2, -1)."""
    counters: dict[str, int] = {}
    layer = DenseLayer((Virtual(LayerLookup(memory, None, 0, method, counters), counters, 2),), seen=2)
    key, value = (torch.tensor([[[x]]], dtype=dtype) for x in ((1.0, 1.0), (2.0, -1.0)))
    layer.update(key, value, kwargs={})
    output, _ = layer.attend(call([[head] for head in query], layer.keys, layer.values, dtype))
    assert counters == {"looked_up": 1}
    return output[0, :, 0]


def merged(entry, query):
    """Section 5.6: w = sigmoid(log Z - s_local), out = a_local + w (a - a_local)."""
    (a, log_z), local, s_local = entry, (2.0, -1.0), dot(query, (1.0, 1.0)) * SCALE
    w = 1 / (1 + math.exp(s_local - log_z))
    return [y + w * (x - y) for x, y in zip(a, local, strict=True)]


def centroid(states, aggregate):
    """Section 5.2: the entry of one head from its members' states (a, s)."""
    n = len(states)
    if aggregate == "mean":
        return [sum(a[i] for a, _ in states) / n for i in range(2)], sum(s for _, s in states) / n
    z = [math.exp(s) for _, s in states]
    a = [sum(w * a[i] for w, (a, _) in zip(z, states, strict=True)) / sum(z) for i in range(2)]
    return a, math.log(sum(z) / n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("aggregate", ["eq5", "mean"])
def test_one_head_one_centroid_of_two_queries(aggregate, dtype, tmp_path):
    traces = [(4.0, 0.0), (2.0, 2.0)]
    store = collected([[q] for q in traces], tmp_path, dtype)
    method = ASM(layout="pooled", aggregate=aggregate, iterations=1)
    memory = LayerBuilder(method, store, 0, Grouping.of("pooled", 1, 1), 1, seed=0).build()
    a, log_z = centroid([state(q) for q in traces], aggregate)
    torch.testing.assert_close(memory.a[0, 0, 0].tolist(), a, rtol=0, atol=1e-6)
    assert memory.log_z.item() == pytest.approx(log_z, abs=1e-6)
    assert memory.count.tolist() == [[2]]
    # The mean query is (3, 1), of length sqrt(10).
    torch.testing.assert_close(memory.keys[0, 0].tolist(), [3 / 10**0.5, 1 / 10**0.5], rtol=0, atol=1e-6)
    assert memory.norm.item() == pytest.approx(10**0.5, rel=1e-6)
    spread = abs(state(traces[0])[1] - state(traces[1])[1]) / 2
    assert memory.std.item() == pytest.approx(spread, abs=1e-5)
    query = (1.5, -1.0)
    output = answer(method, memory, [query], dtype)
    torch.testing.assert_close(output[0].tolist(), merged((a, log_z), query), rtol=0, atol=1e-6)


@pytest.mark.parametrize("aggregate", ["eq5", "mean"])
def test_a_pair_of_heads_looks_up_one_entry_by_cosine(aggregate, tmp_path):
    """Two clusters of two tokens; the query is nearer to the short one, but points to the long one."""
    long = [[(8.0, 0.0), (6.0, 0.0)], [(8.0, 2.0), (6.0, 2.0)]]
    short = [[(0.0, 0.5), (0.0, 1.0)], [(0.0, 1.5), (0.5, 1.0)]]
    traces = [long[0], short[0], long[1], short[1]]
    store = collected(traces, tmp_path, torch.float64)
    method = ASM(layout="pairs", aggregate=aggregate, init="kmeans++", iterations=4)
    memory = LayerBuilder(method, store, 0, Grouping.of("pairs", 2, 1), 2, seed=0).build()
    assert memory.keys.shape == (1, 2, 4) and memory.count.tolist() == [[2, 2]]
    query = [(1.2, 0.9), (1.0, 0.9)]
    flat = [*query[0], *query[1]]
    centres = [[8.0, 1.0, 6.0, 1.0], [0.0, 1.0, 0.25, 1.0]]
    distances = [math.dist(flat, centre) for centre in centres]
    cosines = [dot(flat, centre) / math.hypot(*flat) / math.hypot(*centre) for centre in centres]
    assert distances[1] < distances[0] and cosines[0] > cosines[1]
    output = answer(method, memory, query, torch.float64)
    for head in range(2):
        entry = centroid([state(trace[head]) for trace in long], aggregate)
        expected = merged(entry, query[head])
        torch.testing.assert_close(output[head].tolist(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"iterations": 0}, "method.iterations=0 is not a positive number"),
        ({"chunks": 0}, "method.chunks=0"),
        ({"probe": -1}, "method.probe=-1"),
        ({"cells": 0}, "method.cells=0"),
        ({"heads_per_entry": 0}, "method.heads_per_entry=0"),
        ({"unified_position": -1}, "use 0 or more"),
        ({"ridge": 0.0}, "method.ridge=0.0 must be above 0"),
        ({"slope": True, "whiten": "full"}, "set one of them back"),
    ],
)
def test_knobs_that_make_no_sense_are_refused(knobs, words):
    with pytest.raises(UserError, match=words):
        ASM(**knobs)
