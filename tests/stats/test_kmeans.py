"""K-means on a stream: right clusters, a falling objective, and the same answer from both backends."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvexp.errors import UserError
from kvexp.stats.kmeans import Blocks, Clusters, assign, lloyd, minibatch
from kvexp.stats.pool import DistinctPool


def stream(x: Tensor, size: int) -> Blocks:
    """The rows of x as a restartable stream."""
    return lambda: iter(x.split(size))


def mixture(seed: int, n: int, centres: int, d: int, spread: float, dtype=torch.float32) -> Tensor:
    """Rows scattered around random centres of unequal popularity."""
    g = torch.Generator().manual_seed(seed)
    centre = torch.randn(centres, d, generator=g, dtype=dtype) * 3
    popularity = torch.rand(centres, generator=g) + 0.1
    index = torch.multinomial(popularity, n, replacement=True, generator=g)
    return centre[index] + spread * torch.randn(n, d, generator=g, dtype=dtype)


def error(x: Tensor, clusters: Clusters) -> float:
    """Relative error of replacing each row by its centroid."""
    nearest = clusters.centroids[assign(x, clusters.centroids)]
    return ((x - nearest).norm(dim=1) / x.norm(dim=1)).mean().item()


def rows_of(x: Tensor) -> set[tuple[float, ...]]:
    return {tuple(row) for row in x.tolist()}


@pytest.mark.parametrize("backend", ["torch", "faiss"])
@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_separate_blobs_are_recovered(backend, metric):
    g = torch.Generator().manual_seed(0)
    centre = torch.eye(6) * 10
    x = (centre.repeat_interleave(50, 0) + 0.1 * torch.randn(300, 6, generator=g))[
        torch.randperm(300, generator=g)
    ]
    found = lloyd(stream(x, 77), 6, 10, seed=0, metric=metric, backend=backend, init="kmeans++")
    order = found.centroids.argmax(dim=1).argsort()
    assert found.k_effective == 6 and found.counts.tolist() == [50] * 6
    scale = 1 if metric == "l2" else 10
    torch.testing.assert_close(found.centroids[order] * scale, centre, rtol=0, atol=0.1)
    if metric == "cosine":
        torch.testing.assert_close(found.centroids.norm(dim=1), torch.ones(6))


@pytest.mark.parametrize("init", ["random", "kmeans++"])
@pytest.mark.parametrize("metric", ["l2", "cosine"])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 40))
def test_objective_never_rises_and_centroids_are_means(init, metric, seed, k):
    x = mixture(seed, 200, 10, 4, 1.5, torch.float64)
    found = lloyd(stream(x, 33), k, 100, seed, metric, init=init)
    values = torch.tensor(found.objective)
    assert (values.diff() <= 1e-12).all()
    assert len(values) < 100, "converges on 200 rows"
    index = assign(x, found.centroids, metric)
    assert torch.equal(torch.bincount(index, minlength=found.k_effective), found.counts)
    if metric == "l2":
        for i in range(found.k_effective):
            torch.testing.assert_close(found.centroids[i], x[index == i].mean(0), rtol=1e-9, atol=1e-9)


def test_one_iteration_by_hand():
    x = torch.tensor([[0.0], [2.0], [10.0], [14.0]])
    found = lloyd(stream(x, 3), 2, 1, 0, init=torch.tensor([[1.0], [9.0]]))
    assert found.centroids.tolist() == [[1.0], [12.0]] and found.counts.tolist() == [2, 2]
    assert found.objective == ((1 + 1 + 1 + 25) / 4,)


def test_deterministic_and_independent_of_blocks():
    x = mixture(3, 500, 20, 8, 1.0, torch.float64)
    one = lloyd(stream(x, 500), 30, 8, seed=5)
    for size in (500, 41):
        two = lloyd(stream(x, size), 30, 8, seed=5)
        torch.testing.assert_close(two.centroids, one.centroids, rtol=1e-12, atol=1e-12)
        assert torch.equal(two.counts, one.counts)
    assert not torch.equal(lloyd(stream(x, 500), 30, 8, seed=6).centroids, one.centroids)
    again = [minibatch(stream(x, 64), 30, seed=5, batch=50).centroids for _ in range(2)]
    assert torch.equal(*again) and again[0].dtype == torch.float64


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("k", "spread"), [(32, 0.5), (200, 1.0), (200, 3.0)])
def test_minibatch_comes_within_5_percent_of_lloyd(seed, k, spread):
    x = mixture(seed, 6000, 60, 16, spread)
    full = lloyd(stream(x, 2000), k, 15, seed)
    quick = minibatch(stream(x, 2000), k, seed, batch=256)
    assert error(x, quick) <= 1.05 * error(x, full)


@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_a_dead_centroid_moves_to_the_farthest_sample(metric):
    x = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.9, 0.0], [0.0, 1.0]])
    start = torch.tensor([[1.0, 0.0], [-50.0, -50.0]])
    for found in (
        lloyd(stream(x, 3), 2, 5, 0, metric, init=start),
        minibatch(stream(x, 3), 2, 0, 2, metric, init=start),
    ):
        assert sorted(found.counts.tolist()) == [1, 3]
        torch.testing.assert_close(found.centroids[1], torch.tensor([0.0, 1.0]))


def test_a_cluster_still_empty_in_the_last_pass_is_dropped():
    found = lloyd(stream(torch.tensor([[0.0], [1.0]]), 2), 2, 1, 0, init=torch.tensor([[0.0], [99.0]]))
    assert found.k_effective == 1 and found.centroids.tolist() == [[0.5]]


@pytest.mark.parametrize("init", ["random", "kmeans++"])
@pytest.mark.parametrize("k", [5, 6, 100])
def test_few_distinct_samples_become_the_centroids(init, k):
    distinct = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = distinct[torch.arange(40) % 5]
    for found in (lloyd(stream(x, 7), k, 3, 1, init=init), minibatch(stream(x, 7), k, 1, init=init)):
        assert found.k_effective == 5 and found.counts.tolist() == [8] * 5
        assert rows_of(found.centroids) == rows_of(distinct) and found.objective == (0.0,)


def test_more_distinct_samples_than_centroids():
    x = torch.arange(6.0).unsqueeze(1).repeat(10, 1)
    found = lloyd(stream(x, 7), 5, 20, 0)
    assert found.k_effective == 5 and found.counts.sum() == 60


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 50), k=st.integers(1, 40), d=st.integers(1, 70))
def test_backends_agree_and_ties_go_to_the_lower_number(seed, n, k, d):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, (n, d), generator=g).float()
    centroids = torch.randint(-2, 3, (k, d), generator=g).float()
    centroids[k // 2 :] = centroids[: k - k // 2].clone()
    distance = (x.unsqueeze(1) - centroids).square().sum(-1)
    first = (distance == distance.min(1, keepdim=True).values).int().argmax(1)
    for backend in ("torch", "faiss"):
        assert torch.equal(assign(x, centroids, "l2", backend), first)


@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_backends_agree_on_real_sizes(metric):
    x, centroids = mixture(0, 3000, 50, 96, 1.0), mixture(1, 700, 50, 96, 1.0)
    one, two = assign(x, centroids, metric, "torch"), assign(x, centroids, metric, "faiss")
    exact = assign(x.double(), centroids.double(), metric)
    assert (one == exact).float().mean() > 0.999 and (two == exact).float().mean() > 0.999


def test_faiss_keeps_its_own_thread_setting():
    faiss = pytest.importorskip("faiss")
    before = faiss.omp_get_max_threads()
    assign(torch.randn(4, 2), torch.randn(3, 2), backend="faiss")
    assert faiss.omp_get_max_threads() == before


def test_refusals():
    x = torch.zeros(3, 2)
    with pytest.raises(UserError, match="did you mean 'cosine'"):
        lloyd(stream(x, 2), 2, 1, 0, metric="cosin")
    with pytest.raises(UserError, match="init"):
        lloyd(stream(x, 2), 2, 1, 0, init="first")
    with pytest.raises(UserError, match="backend"):
        assign(x, x, backend="gpu")
    with pytest.raises(UserError, match="float32"):
        assign(x.double(), x.double(), backend="faiss")
    with pytest.raises(ValueError, match="no samples"):
        lloyd(lambda: iter([]), 2, 1, 0)
    with pytest.raises(ValueError, match="iteration"):
        lloyd(stream(x, 2), 2, 0, 0)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.integers(0, 12), min_size=1, max_size=40),
    size=st.integers(1, 15),
    cut=st.integers(1, 9),
)
def test_pool_keeps_the_first_distinct_rows_of_the_priority_order(values, size, cut):
    rows = torch.tensor(values, dtype=torch.float32).unsqueeze(1)
    priority = torch.rand(
        len(values), generator=torch.Generator().manual_seed(len(values)), dtype=torch.float64
    )
    pool = DistinctPool(size)
    for x, p in zip(rows.split(cut), priority.split(cut), strict=True):
        pool.offer(x, p)
    order = list(dict.fromkeys(values[i] for i in priority.argsort().tolist()))
    assert pool.rows.flatten().tolist() == order[:size]
    assert pool.overflow == (len(order) > size)


def test_pool_takes_both_zeros_as_one_row():
    pool = DistinctPool(3)
    pool.offer(torch.tensor([[0.0], [-0.0]]), torch.tensor([1.0, 2.0]))
    assert len(pool.rows) == 1
