"""A whole step of decoding on a memory: the plain form by hand, the twin in C++ by the plain form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvexp_kernels.lookup import CellLists, Cells, JointLists, TwoLevelIndex, lookup_flat, quantise_keys
from kvexp_kernels.lookup_attend import NativeStep, lookup_attend, native_step
from kvexp_kernels.lookup_merge import Entries


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unit(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


# (codebooks, samples of a token, heads of a sample): pooled, pairs, and one codebook for all
HEADS = {
    "pooled": torch.arange(9).view(3, 3, 1),
    "pairs": torch.arange(8).view(2, 2, 2),
    "shared": torch.tensor([[[0, 2, 4], [1, 3, 5]]]),
    "many": torch.arange(10).view(2, 5, 1),
}


class Problem:
    """Entries, queries, and local rows that are a slice of a longer buffer."""

    def __init__(self, layout: str, width: int, k: int = 90, batch: int = 2, rows: int = 7) -> None:
        self.head_of = HEADS[layout]
        books, samples, each = self.head_of.shape
        heads, kv = self.head_of.numel(), 3 if layout in ("pooled", "shared") else 2
        narrow = width - 3
        self.entries = Entries(
            unit(numbers(books, k, each * width, seed=1)),
            numbers(books, k, each, narrow, seed=2),
            numbers(books, k, each, seed=3),
        )
        self.indices = [TwoLevelIndex.build(keys, 8 + book) for book, keys in enumerate(self.entries.keys)]
        self.x = numbers(books, batch * samples, each * width, seed=4) * 5
        self.query = numbers(batch, heads, width, seed=5)
        self.key = numbers(batch, kv, rows + 9, width, seed=6)[:, :, 4 : rows + 4]
        self.value = numbers(batch, kv, rows + 9, narrow, seed=7)[:, :, 4 : rows + 4]

    def native(self, entries: Entries, lists: CellLists | None = None) -> NativeStep:
        step = native_step(entries, self.head_of, lists)
        if step is None:
            pytest.skip("there is no C++ compiler here")
        return step

    def compare(self, entries: Entries, lists: CellLists | None, scored: int) -> None:
        step = self.native(entries, lists)
        assert step.takes(self.x, self.query, self.key, self.value)
        given = self.query, self.key, self.value, 0.3
        a, s, index = lookup_attend(self.x, *given, entries, self.head_of)
        ours = step.lookup_attend(self.x, *given)
        torch.testing.assert_close(ours[:2], (a, s), rtol=1e-5, atol=1e-5)
        found, cost = step.lookup(self.x)
        assert torch.equal(found, index) and cost == ours[2] <= scored


def test_by_hand():
    """The entry (4, log 3) of the second key, and local rows of values 10 and 20 with scores 0 and 0."""
    entries = Entries(
        torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]),
        torch.tensor([[[[2.0]], [[4.0]]]]),
        torch.tensor([[[0.0], [3.0]]]).log(),
    )
    x, query, key = torch.tensor([[[1.0, 3.0]]]), torch.zeros(1, 1, 2), torch.ones(1, 1, 2, 2)
    value = torch.tensor([10.0, 20.0]).view(1, 1, 2, 1)
    a, s, index = lookup_attend(x, query, key, value, 1.0, entries, torch.zeros(1, 1, 1, dtype=torch.int64))
    assert index.tolist() == [[1]]
    torch.testing.assert_close(a.item(), (3 * 4 + 10 + 20) / 5)
    torch.testing.assert_close(s.exp().item(), 5.0)


def scored_by(made: Problem, probe: int) -> int:
    return sum(index.search(x, probe)[1] for index, x in zip(made.indices, made.x, strict=True))


@pytest.mark.parametrize("layout", HEADS)
@pytest.mark.parametrize("width", [12, 21, 64])
def test_the_twin_finds_and_merges_the_same(poisoned, layout, width):
    made = Problem(layout, width)
    books, count, _ = made.x.shape
    made.compare(made.entries, None, scored=books * count * 90)
    two = replace(made.entries, cells=Cells.stack(made.indices), probe=3)
    made.compare(two, CellLists.of(made.indices), scored_by(made, 3))


@pytest.mark.parametrize("rows", [0, 1, 130])
def test_any_number_of_local_rows(poisoned, rows):
    made = Problem("pooled", 64, batch=1, rows=rows)
    made.compare(made.entries, None, scored=3 * 3 * 90)


def test_entries_in_codes(poisoned):
    made = Problem("pairs", 16)
    codes, scale = quantise_keys(made.entries.a.flatten(0, 1))
    coded = replace(made.entries, a=codes.view_as(made.entries.a), a_scale=scale.view_as(made.entries.log_z))
    made.compare(coded, None, scored=2 * 4 * 90)


def test_lists_of_faiss_are_scanned_where_they_lie():
    pytest.importorskip("faiss")
    made = Problem("pooled", 64, k=400)
    joint = JointLists(made.indices, made.entries.keys)
    lists = joint.cell_lists()
    assert lists.half and sum(map(len, lists.keys)) == 3 * 400
    two = replace(made.entries, cells=Cells.stack(made.indices), probe=4)
    made.compare(two, lists, scored=joint.search(made.x, 4)[1])


@pytest.mark.parametrize("length", [1.0, 0.9, 1.1])
def test_cells_that_cannot_hold_the_best_key_are_left_out(length):
    """Keys in a few directions; with all cells probed the answer is that of flat lookup."""
    directions = numbers(20, 24, seed=0)
    near = torch.arange(600) % 20
    keys = length * unit(directions[near] + 0.3 * numbers(600, 24, seed=1))
    x = (directions[near[:60]] + 0.3 * numbers(60, 24, seed=2))[None]
    index = TwoLevelIndex.build(keys, 20)
    cells = CellLists.of([index])
    half = CellLists(cells.centres, [k.half() for k in cells.keys], cells.entries)
    entries = Entries(keys[None], torch.zeros(1, 600, 1, 8), torch.zeros(1, 600, 1), probe=20)
    for lists in (cells, half):
        step = native_step(entries, torch.arange(3).view(1, 3, 1), lists)
        if step is None:
            pytest.skip("there is no C++ compiler here")
        found = [step.lookup(part) for part in x.split(3, dim=1)]
        assert torch.equal(torch.cat([index for index, _ in found], dim=1), lookup_flat(x, keys[None])[0])
        assert sum(cost for _, cost in found) < 0.5 * 60 * 620


def test_what_half_precision_leaves_open_is_decided_by_the_keys():
    """Keys that are nearer to each other than half precision can tell."""
    base = unit(numbers(64, seed=0))
    keys = unit(base + 1e-5 * numbers(40, 64, seed=1))[None]
    index = TwoLevelIndex.build(keys[0], 4)
    cells = CellLists.of([index])
    half = CellLists(cells.centres, [k.half() for k in cells.keys], cells.entries)
    x = (base + 0.3 * numbers(3, 64, seed=2))[None]
    entries = Entries(keys, numbers(1, 40, 1, 8, seed=3), numbers(1, 40, 1, seed=4), probe=4)
    step = native_step(entries, torch.arange(3).view(1, 3, 1), half)
    if step is None:
        pytest.skip("there is no C++ compiler here")
    exact, rounded = ((x.double() @ k.double().mT)[0] for k in (keys, keys.half()))
    assert (exact.argmax(1) != rounded.argmax(1)).any()
    found = step.lookup(x)[0][0]
    reached = exact.gather(1, found[:, None])[:, 0]
    assert ((exact.amax(1) - reached) / x[0].norm(dim=1) < 2e-7).all()


def test_equal_scores_go_to_the_lower_entry():
    keys = torch.eye(4)[torch.tensor([2, 3, 1, 1, 3, 0])][None]
    entries = Entries(keys, torch.zeros(1, 6, 1, 2), torch.zeros(1, 6, 1), probe=9)
    index = TwoLevelIndex.build(keys[0], 3)
    x = torch.tensor([[[0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, -1.0, -1.0, 0.0]]])
    for lists in (None, CellLists.of([index])):
        step = native_step(entries, torch.arange(3).view(1, 3, 1), lists)
        if step is None:
            pytest.skip("there is no C++ compiler here")
        assert step.lookup(x)[0].tolist() == [[1, 0, 1]]


def test_what_the_twin_leaves_to_torch():
    made = Problem("pooled", 16)
    bfloat = replace(made.entries, a=made.entries.a.bfloat16())
    assert native_step(bfloat, made.head_of) is None
    codes, scale = quantise_keys(made.entries.keys)
    coded = replace(made.entries, keys=codes, key_scale=scale)
    assert native_step(coded, made.head_of) is None, "flat lookup reads the keys"
    step = made.native(coded, CellLists.of(made.indices))
    given = made.x, made.query, made.key, made.value
    assert step.takes(*given)
    assert not step.takes(*(t.double() for t in given))
    assert not step.takes(*given[:2], made.key[:1], made.value[:1])
    assert not step.takes(made.x.repeat(1, 5, 1), *given[1:])
    assert not step.takes(*given[:3], made.value.mT.contiguous().mT)
    assert not step.takes(made.x, made.query.clone().requires_grad_(), *given[2:])
