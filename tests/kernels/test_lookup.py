"""Flat lookup is the exact cosine maximum; two-level lookup agrees with it, and inverted lists with that."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvexp_kernels.lookup import (
    InvertedLists,
    JointLists,
    TwoLevelIndex,
    lookup_flat,
    quantise_keys,
    reference,
)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def clustered(n: int, d: int, seed: int, dtype=torch.float32) -> Tensor:
    """Vectors of low intrinsic dimension, as real queries are."""
    g = torch.Generator().manual_seed(seed)
    basis = torch.randn(12, d, generator=torch.Generator().manual_seed(99), dtype=dtype)
    noise = torch.randn(n, d, generator=g, dtype=dtype)
    return torch.randn(n, 12, generator=g, dtype=dtype) @ basis + 0.3 * noise


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 20), k=st.integers(1, 30))
def test_flat_finds_the_largest_cosine_whatever_the_chunks(seed, n, k):
    x = torch.stack([clustered(n, 8, seed + c, torch.float64) for c in range(3)]) * 7
    keys = torch.stack([unit(clustered(k, 8, seed + 9 + c, torch.float64)) for c in range(3)])
    cosine = torch.nn.functional.cosine_similarity(x.unsqueeze(2), keys.unsqueeze(1), dim=-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "SCORE_BYTES", 3 * k * 8 * 4)
        index, score = lookup_flat(x, keys)
    assert torch.equal(index, cosine.argmax(-1))
    torch.testing.assert_close(score / x.norm(dim=-1), cosine.amax(-1))
    torch.testing.assert_close(index, lookup_flat(x, keys)[0])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 30), k=st.integers(2, 60), cells=st.integers(1, 8))
def test_equal_scores_go_to_the_lower_entry(seed, n, k, cells):
    g = torch.Generator().manual_seed(seed)
    keys = torch.eye(4)[torch.randint(0, 4, (k,), generator=g)]  # whole numbers: no rounding
    x = torch.randint(-2, 3, (n, 4), generator=g).float()
    score = x @ keys.T
    first = (score == score.amax(1, keepdim=True)).int().argmax(1)
    assert torch.equal(lookup_flat(x[None], keys[None])[0][0], first)
    index = TwoLevelIndex.build(keys, cells)
    assert torch.equal(index.search(x, probe=cells)[0], first)
    assert torch.equal(torch.cat([index.search(row, probe=cells)[0] for row in x.split(1)]), first)


def test_half_precision_queries_are_multiplied_in_float32():
    x, keys = clustered(50, 64, 0).bfloat16()[None], unit(clustered(300, 64, 1))[None]
    index, score = lookup_flat(x, keys)
    want, want_score = lookup_flat(x.double(), keys.double())
    assert score.dtype == torch.float32 and torch.equal(index, want)
    torch.testing.assert_close(score.double(), want_score, rtol=1e-5, atol=1e-4)


def test_int8_keys():
    keys = torch.tensor([[[1.0, 0.0], [0.6, -0.8], [0.0, 0.0]]])
    whole, scale = quantise_keys(keys)
    assert whole.tolist() == [[[127, 0], [95, -127], [0, 0]]]
    torch.testing.assert_close(scale, torch.tensor([[1.0, 0.8, 0.0]]) / 127)
    index, score = lookup_flat(torch.tensor([[[0.0, -2.0], [3.0, 0.0]]]), whole, scale)
    assert index.tolist() == [[1, 0]]
    torch.testing.assert_close(score, torch.tensor([[1.6, 3.0]]))
    x, real = clustered(400, 64, 0)[None], unit(clustered(1000, 64, 1))[None]
    exact, best = lookup_flat(x, real)
    rounded, _ = lookup_flat(x, *quantise_keys(real))
    assert (exact == rounded).float().mean() > 0.95
    reached = (x[0] * real[0, rounded[0]]).sum(-1)
    assert ((best[0] - reached) / best[0]).max() < 0.01


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 200), cells=st.integers(1, 30), n=st.integers(1, 40))
def test_two_level_equals_flat_when_every_cell_is_probed(seed, k, cells, n):
    keys, x = unit(clustered(k, 16, seed, torch.float64)), clustered(n, 16, seed + 1, torch.float64)
    index = TwoLevelIndex.build(keys, cells, seed)
    flat = lookup_flat(x[None], keys[None])[0][0]
    for part in (x, x[:1]):  # by cell and by query
        found, scored = index.search(part, probe=cells)
        assert torch.equal(found, flat[: len(part)])
        assert scored == len(part) * (len(index.centres) + k)


def test_two_level_layout():
    keys = unit(clustered(500, 16, 0))
    index = TwoLevelIndex.build(keys, 20, 3)
    assert torch.equal(index.entries.sort().values, torch.arange(500))
    assert torch.equal(index.keys, keys[index.entries])
    assert index.offsets[0] == 0 and index.offsets[-1] == 500
    assert (torch.tensor(index.offsets).diff() > 0).all(), "no cell is empty"
    nearest = (index.keys @ index.centres.T).argmax(1)
    for cell, (low, high) in enumerate(zip(index.offsets[:-1], index.offsets[1:], strict=True)):
        assert (nearest[low:high] == cell).all()
        assert (index.entries[low:high].diff() > 0).all()
    again = TwoLevelIndex.build(keys, 20, 3)
    assert torch.equal(index.entries, again.entries) and torch.equal(index.centres, again.centres)


def test_identical_keys_leave_no_empty_cell():
    index = TwoLevelIndex.build(unit(torch.ones(10, 4)), 5)
    found, scored = index.search(torch.ones(3, 4))
    assert len(index.centres) == 1 and found.tolist() == [0, 0, 0] and scored == 3 * 11


def test_both_paths_score_the_same_keys_and_recall_is_high():
    keys, x = unit(clustered(2048, 64, 0)), clustered(256, 64, 1)
    index = TwoLevelIndex.build(keys, 64)
    flat = lookup_flat(x[None], keys[None])[0][0]
    found, scored = index.search(x, probe=16)
    single = [index.search(row, probe=16) for row in x.split(1)]
    assert (found == torch.cat([one[0] for one in single])).float().mean() > 0.99
    assert scored == sum(one[1] for one in single)
    assert (found == flat).float().mean() > 0.98
    assert scored < 0.5 * 256 * 2048
    few, cheap = index.search(x, probe=2)
    assert cheap < scored and (few == flat).float().mean() < (found == flat).float().mean()


def rank_of_the_right_cell(index: TwoLevelIndex, x: Tensor, keys: Tensor) -> Tensor:
    """How many cells must be searched for each query, by going through all of them in turn."""
    flat, needed = (x @ keys.T).argmax(1), torch.zeros(len(x), dtype=torch.int64)
    for row, cells in enumerate((x @ index.centres.T).argsort(1, descending=True).tolist()):
        for place, cell in enumerate(cells):
            if flat[row] in index.entries[index.offsets[cell] : index.offsets[cell + 1]]:
                needed[row] = place + 1
    return needed


@pytest.mark.parametrize("recall", [0.5, 0.9, 0.99, 1.0])
def test_as_many_cells_as_a_recall_needs(recall):
    keys, x, later = unit(clustered(1500, 32, 0)), clustered(300, 32, 1), clustered(600, 32, 2)
    index = TwoLevelIndex.build(keys, 40)
    probe, needed = index.probe_for(x, recall), rank_of_the_right_cell(index, x, keys)
    assert (needed <= probe).float().mean() >= recall
    assert probe == 1 or (needed < probe).float().mean() < recall, "one fewer is too few"
    flat = lookup_flat(later[None], keys[None])[0][0]
    held_out = (index.search(later, probe)[0] == flat).float().mean()
    assert held_out >= recall - 3 * (recall * (1 - recall) / 300) ** 0.5 - 0.01  # of another sample


class TestInvertedLists:
    @pytest.fixture(autouse=True)
    def faiss(self):
        pytest.importorskip("faiss")

    @pytest.mark.parametrize("n", [1, 3, 200])
    @pytest.mark.parametrize("probe", [1, 7, 100])
    def test_find_what_the_index_finds(self, n, probe):
        keys, x = unit(clustered(900, 32, 0)), clustered(n, 32, 1)
        index = TwoLevelIndex.build(keys, 30)
        found, scored = InvertedLists(index, keys).search(x, probe)
        want, want_scored = index.search(x, probe)
        assert torch.equal(found, want) and scored == want_scored
        assert found.dtype == torch.int64 and type(scored) is int

    def test_equal_scores_go_to_the_lower_entry(self):
        g = torch.Generator().manual_seed(0)
        keys = torch.eye(4)[torch.randint(0, 4, (60,), generator=g)]
        x = torch.randint(-2, 3, (40, 4), generator=g).float()
        score = x @ keys.T
        lists = InvertedLists(TwoLevelIndex.build(keys, 4), keys)
        assert torch.equal(lists.search(x, 4)[0], (score == score.amax(1, keepdim=True)).int().argmax(1))

    def test_keys_that_half_precision_cannot_tell_apart_are_compared_again(self):
        keys = torch.tensor([[1.0, 0.0], [1.0, 1e-5], [1.0, -1e-5]])
        keys = torch.cat([keys, torch.tensor([[-1.0, 0.0]])])
        lists = InvertedLists(TwoLevelIndex.build(keys, 1), keys)
        assert lists.search(torch.tensor([[0.0, 1.0], [0.0, -1.0], [-1.0, 0.0]]), 1)[0].tolist() == [1, 2, 3]

    def test_bytes_are_those_of_float16_keys_and_the_keys_are_not_copied(self):
        keys = unit(clustered(500, 16, 0))
        index = TwoLevelIndex.build(keys, 20)
        lists = InvertedLists(index, keys)
        held = sum(t.numel() * t.element_size() for t in lists.tensors())
        assert held == len(index.centres) * 16 * 4 + 500 * (16 * 2 + 8)
        assert torch.equal(lists.centres, index.centres)
        codes, entries = (torch.cat(lists.tensors()[first::2]) for first in (1, 2))
        assert torch.equal(codes, index.keys.half()) and torch.equal(entries, index.entries)
        keys.copy_(keys.roll(1, 0))  # what is compared again is the caller's
        assert (lists.search(index.keys[:5], 1)[0] != index.entries[:5]).any()

    def test_queries_that_are_no_numbers_stay_in_bounds(self):
        keys = unit(clustered(50, 8, 0))
        found, _ = InvertedLists(TwoLevelIndex.build(keys, 5), keys).search(torch.full((2, 8), torch.nan), 3)
        assert ((found >= 0) & (found < 50)).all()

    def test_what_they_hold(self):
        assert InvertedLists.suits(torch.ones(2, 2))
        assert not InvertedLists.suits(torch.ones(2, 2).double())


class TestJointLists:
    """Two codebooks of 64 keys, with unlike numbers of cells."""

    @pytest.fixture(autouse=True)
    def faiss(self):
        pytest.importorskip("faiss")

    @staticmethod
    def built(cells: tuple[int, int] = (8, 5)) -> tuple[list[TwoLevelIndex], torch.Tensor]:
        keys = unit(torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(1)))
        return [TwoLevelIndex.build(k, c) for k, c in zip(keys, cells, strict=True)], keys

    @pytest.mark.parametrize("n", [1, 70])
    @pytest.mark.parametrize("probe", [1, 3, 8])
    def test_find_what_each_index_finds(self, n, probe):
        indices, keys = self.built()
        x = torch.randn(2, n, 16, generator=torch.Generator().manual_seed(2))
        found, scored = JointLists(indices, keys).search(x, probe)
        parts = [index.search(part, probe) for index, part in zip(indices, x, strict=True)]
        assert torch.equal(found, torch.stack([entries for entries, _ in parts]))
        assert scored == sum(cost for _, cost in parts)

    def test_equal_scores_go_to_the_lower_entry(self):
        key = unit(torch.arange(1.0, 9.0))
        keys = key.expand(2, 40, 8).contiguous()
        found, _ = JointLists([TwoLevelIndex.build(k, 4) for k in keys], keys).search(keys[:, :3], 4)
        assert found.tolist() == [[0] * 3] * 2

    def test_bytes_are_those_of_float16_keys_numbers_and_centres(self):
        indices, keys = self.built((8, 8))
        held = sum(t.numel() * t.element_size() for t in JointLists(indices, keys).tensors())
        assert held == 2 * 64 * (2 * 16 + 8) + 4 * 16 * sum(len(index.centres) for index in indices)

    def test_queries_that_are_no_numbers_stay_in_bounds(self):
        indices, keys = self.built()
        found, _ = JointLists(indices, keys).search(torch.full((2, 3, 16), torch.nan), 3)
        assert int(found.min()) >= 0 and int(found.max()) < 64
