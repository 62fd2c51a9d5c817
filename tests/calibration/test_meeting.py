"""Several processes that each read a share of a stream find what one finds that reads it whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import crews
from kvexp.calibration.meeting import Meeting
from kvexp.methods.memory.asm import ASM
from kvexp.methods.memory.build import LayerBuilder
from kvexp.methods.memory.grouping import Grouping
from kvexp.stats.kmeans import lloyd
from kvexp.stats.samples import SampleStore
from kvexp.stats.shares import WHOLE, Shares


def shared(x: Tensor, shares: Shares, k: int, **options: Any) -> Any:
    rows = shares.rows(len(x))
    mine = x[rows.start : rows.stop]
    return lloyd(lambda: iter(mine.split(7)), k, 4, 3, shares=shares, before=rows.start, **options)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(2, 60),
    k=st.integers(1, 12),
    ranks=st.integers(2, 5),
    init=st.sampled_from(["random", "kmeans++"]),
    metric=st.sampled_from(["l2", "cosine"]),
)
def test_lloyd_over_shares_is_lloyd(tmp_path_factory, seed, n, k, ranks, init, metric) -> None:
    """Also with shares of no row, few distinct rows, and centroids that die; each rank has the very same."""
    folder = tmp_path_factory.mktemp("meeting")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    if seed % 3 == 0:
        x = x[torch.arange(n) % 4]
    one = shared(x, WHOLE, k, init=init, metric=metric)
    several = crews.together(
        ranks, lambda crew: shared(x, Meeting(folder, crew), k, init=init, metric=metric)
    )
    for found in several:
        assert torch.equal(found.centroids, several[0].centroids)
        assert torch.equal(found.counts, one.counts)
        assert found.objective == pytest.approx(one.objective, rel=1e-9, abs=1e-15)
        torch.testing.assert_close(found.centroids, one.centroids, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "knobs",
    [
        {"residual": True},
        {"slope": True, "layout": "shared"},
        {"whiten": "full", "final": "cosine"},
        {"kmeans": "minibatch", "layout": "group"},
        {"aggregate": "mean", "init": "random"},
    ],
)
def test_a_layer_that_is_built_together_is_that_of_one(tmp_path: Path, knobs: dict[str, Any]) -> None:
    method = ASM(**{"layout": "pooled", **knobs})
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (4, 8), "a": (4, 6), "s": (4,)} | ({"slope": (4, 8)} if method.slope else {})
    store = SampleStore.create(tmp_path / "samples", [0], shapes, torch.float64)
    store.append(
        0,
        **{
            name: torch.randn(50, *of, generator=generator, dtype=torch.float64)
            for name, of in shapes.items()
        },
    )
    grouping = Grouping.of(method.layout, 4, 2)

    def built(shares: Shares) -> dict[str, Tensor]:
        return LayerBuilder(method, store, 0, grouping, 9, 0, shares=shares).build().tensors

    one = built(WHOLE)
    for tensors in crews.together(3, lambda crew: built(Meeting(tmp_path / "meeting", crew))):
        assert tensors.keys() == one.keys()
        for name, x in one.items():
            torch.testing.assert_close(tensors[name], x, rtol=1e-8, atol=1e-9)


def test_what_a_killed_run_left_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "meeting").mkdir()
    (tmp_path / "meeting/share-1-0.safetensors").write_bytes(b"half")
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    crews.together(2, lambda crew: shared(x, Meeting(tmp_path / "meeting", crew), 4))
    assert not list((tmp_path / "meeting").iterdir())
