"""Entries get better with their number, mini-batches come near full iterations, and memory stays flat."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

import helpers
from kvexp.methods.memory import build
from kvexp.methods.memory.asm import ASM
from kvexp.methods.memory.build import LayerBuilder, stored
from kvexp.methods.memory.grouping import Grouping
from kvexp.methods.memory.lookup import LayerLookup
from kvexp.stats import kmeans
from kvexp.stats.samples import SampleStore


def sentences(n, length, first_seed=0):
    """Traces of twelve words: like real ones, they say the same things again and again."""
    return [tuple(t % 12 for t in helpers.tokens(length, seed=first_seed + s)) for s in range(n)]


TRACES, HELD_OUT = sentences(160, 6), sentences(24, 6, first_seed=1000)


def mean(values):
    return sum(values) / len(values)


def rebuilt(made, k, **knobs):
    """The mean error on held-out queries when the same samples are clustered into k entries."""
    method = replace(made.method, **knobs)
    grouping = made.layers()[0].grouping
    made.memory.layers = {
        layer: stored(LayerBuilder(method, made.samples, layer, grouping, k, 0).build(), torch.float32, False)
        for layer in made.memory.layers
    }
    return mean(made.errors(HELD_OUT).relative_errors())


@pytest.mark.parametrize("aggregate", ["eq5", "mean"])
@pytest.mark.parametrize("layout", ["pooled", "shared"])
def test_the_error_on_held_out_queries_falls_as_entries_grow(prepared, layout, aggregate):
    made = prepared(TRACES, 4, layout=layout, aggregate=aggregate)
    errors = [rebuilt(made, k) for k in (4, 16, 64, 256)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.5 * errors[0]


def test_minibatches_come_near_full_iterations(prepared):
    made = prepared(TRACES, 4, layout="pooled")
    for k in (16, 64):
        assert rebuilt(made, k, kmeans="minibatch", iterations=1) < 1.05 * rebuilt(made, k, iterations=8)


@pytest.mark.parametrize(
    "knobs",
    [
        {"init": "kmeans++"},
        {"metric": "cosine"},
        {"final": "cosine"},
        {"backend": "torch"},
        {"kmeans": "minibatch"},
    ],
)
def test_every_way_to_cluster_accounts_for_every_sample(prepared, knobs):
    made = prepared(TRACES[:8], 16, layout="pooled", **knobs)
    for layer, memory in made.memory.layers.items():
        assert memory.keys.shape == (2, 16, 16)
        assert memory.count.sum(1).tolist() == [3 * made.samples.count(layer)] * 2
        torch.testing.assert_close(memory.keys.norm(dim=-1), torch.ones(2, 16))


@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_norms_are_the_length_of_the_mean_query_along_the_key(prepared, metric):
    """Also where clustering saw unit vectors: corrections start from the centroid itself."""
    made = prepared(TRACES[:8], 6, layout="pooled", final="cosine", metric=metric)
    [block] = made.samples.blocks(1, 10**6)
    keys, memory = made.layers()[1].grouping.split(block["q"]).flatten(-2), made.layers()[1]
    for book in range(2):
        index = (keys[book] @ memory.keys[book].T).argmax(1)
        for entry in range(6):
            along = keys[book][index == entry].mean(0) @ memory.keys[book, entry]
            assert memory.norm[book, entry].item() == pytest.approx(float(along), abs=1e-4)
    assert memory.norm.mean() > 1.5


def crafted(folder, q):
    """A store of one layer with queries q [n, H, D] and states that tell samples apart."""
    n, heads, _ = q.shape
    store = SampleStore.create(folder, [0], {"q": q.shape[1:], "a": (heads, 2), "s": (heads,)}, torch.float32)
    mark = torch.arange(n, dtype=torch.float32)
    store.append(0, q=q, a=mark[:, None, None].expand(n, heads, 2), s=mark[:, None].expand(n, heads) / n)
    return store


def test_copies_that_fill_a_shorter_codebook_are_never_chosen(tmp_path):
    """The first KV head has three distinct queries, the second twelve."""
    q = torch.randn(12, 2, 4, generator=torch.Generator().manual_seed(0))
    q[:, 0] = q[:3, 0].repeat(4, 1)
    grouping, method = Grouping.of("pooled", 2, 2), ASM(layout="pooled")
    memory = LayerBuilder(method, crafted(tmp_path, q), 0, grouping, 12, 0).build()
    assert memory.keys.shape == (2, 12, 4)
    assert torch.equal(memory.keys[0, 3:], memory.keys[0, :1].expand(9, 4))
    asked = torch.randn(500, 2, 4, generator=torch.Generator().manual_seed(1))
    for lookup in ("flat", "two_level"):
        method = replace(method, lookup=lookup, cells=4, probe=4)
        chosen = LayerLookup(memory, None, 0, method, {}).nearest(grouping.split(asked).flatten(-2))
        assert chosen[0].max() == 2 and len(chosen[1].unique()) == 12


def test_whitening_of_queries_in_a_thin_subspace_stays_finite(tmp_path):
    """All queries of a head on one line: without shrinking, its covariance has no inverse root."""
    direction = torch.tensor([1.0, 2.0, -1.0, 0.5])
    q = torch.linspace(-3, 3, 12)[:, None, None] * direction + torch.zeros(12, 1, 4)
    method = ASM(whiten="full")
    built = LayerBuilder(method, crafted(tmp_path, q), 0, Grouping.of("pooled", 1, 1), 12, 0).build()
    memory = stored(built, torch.float32, False)
    assert all(x.isfinite().all() for x in memory.tensors.values())
    assert memory.whiten.dtype == torch.float32
    a, _ = LayerLookup(memory, None, 0, method, {}).find(q)
    # On a line a cosine tells two sides apart, no more: each query finds a sample of its own side.
    assert ((a[:, 0, 0] < 5.5) == (torch.arange(12) < 6)).all()
    # Along the line the whitened variance is 1 / (1 + shrink / 4); across it only the shrinking is seen.
    along = (q[:, 0] @ memory.whiten[0] @ direction / direction.norm()).var()
    assert float(along) == pytest.approx(1 / (1 + 1e-3 / 4), rel=1e-4)


def live_bytes() -> int:
    """Bytes of all tensors that Python can reach, but for those that were there at `gc.freeze`."""
    storages = [item.untyped_storage() for item in gc.get_objects() if type(item) is torch.Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("in_memory", [0, 64 << 10])
def test_memory_does_not_grow_with_the_traces(prepared, monkeypatch, in_memory):
    """Blocks have one size, and what is kept of a layer stays under its bound."""
    monkeypatch.setattr(build, "BLOCK_BYTES", 0)  # blocks of 256 tokens
    monkeypatch.setattr(build, "IN_MEMORY_BYTES", in_memory)
    peaks, sizes, inner = [], set(), kmeans.assign

    def watched(x, *rest):
        sizes.add(len(x))
        peaks[-1] = max(peaks[-1], live_bytes())
        return inner(x, *rest)

    prepared(TRACES[:4], 8, layout="pooled")  # whatever is made once
    monkeypatch.setattr(kmeans, "assign", watched)
    gc.freeze()
    try:
        for repeat in (1, 4):
            peaks.append(0)
            prepared(TRACES * repeat, 8, layout="pooled", iterations=1)
    finally:
        gc.unfreeze()
    assert max(sizes) == 3 * 256
    assert 3 * 256 * 16 * 4 < peaks[1] < peaks[0] + (8 << 10)


@pytest.mark.parametrize(("bound", "reads"), [(10**9, 1), (1, 1), (0, 3)])
def test_queries_are_read_once_where_they_fit(prepared, monkeypatch, bound, reads):
    """The layer whole, each codebook on its own, or, at two passes and the start, neither."""
    made = prepared(TRACES[:8], 8, layout="pooled")
    layer_bytes = made.samples.count(0) * 6 * 16 * 4
    monkeypatch.setattr(build, "IN_MEMORY_BYTES", {10**9: 10**9, 1: layer_bytes // 2, 0: 0}[bound])
    count, inner = [0], LayerBuilder._read_keys

    def counted(self):
        count[0] += 1
        return inner(self)

    monkeypatch.setattr(LayerBuilder, "_read_keys", counted)
    grouping = made.layers()[0].grouping
    again = LayerBuilder(replace(made.method, iterations=2), made.samples, 0, grouping, 8, 0).build()
    books = 1 if bound == 10**9 else 2
    assert count[0] == books * reads
    same = LayerBuilder(replace(made.method, iterations=2), made.samples, 0, grouping, 8, 0)
    monkeypatch.setattr(build, "IN_MEMORY_BYTES", 10**9)
    for name, x in same.build().tensors.items():
        assert torch.equal(x, again.tensors[name]), name
