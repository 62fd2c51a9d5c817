"""The sample store gives back what it was given, block by block."""

from __future__ import annotations

import math
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvexp.stats.samples import SampleStore

FIELDS = {"q": (2, 3), "a": (2, 4), "s": (2,)}


def rows(n: int, seed: int, dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """Samples that the store's dtype holds exactly; s has digits that float16 lacks."""
    g = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    made = {name: torch.randn(n, *shape, generator=g).to(dtype) for name, shape in FIELDS.items()}
    return {**made, "s": torch.randn(n, 2, generator=g, dtype=wide) * 60}


def read(store: SampleStore, layer: int, size: int) -> dict[str, Tensor]:
    """A whole layer, read in blocks."""
    blocks = list(store.blocks(layer, size))
    assert all(len(b["q"]) == size for b in blocks[:-1]) and len(blocks[-1]["q"]) <= size
    return {name: torch.cat([b[name] for b in blocks]) for name in FIELDS}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=5), size=st.integers(1, 11))
def test_round_trip_of_shards_in_order_for_any_block_size(tmp_path_factory, dtype, sizes, size):
    folder = tmp_path_factory.mktemp("store")
    given_rows = [rows(n, i, dtype) for i, n in enumerate(sizes)]
    half = len(sizes) // 2
    for shard, pieces in (("rank0", given_rows[:half]), ("rank1", given_rows[half:])):
        store = SampleStore.create(folder / shard, [3, 7], FIELDS, dtype)
        for piece in pieces:
            store.append(7, **piece)
        store.close()
    store = SampleStore.merge([folder / "rank0", folder / "rank1"])
    assert store.count(7) == sum(sizes) and store.count(3) == 0 and store.layers == (3, 7)
    assert list(store.blocks(3, 5)) == []
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    found = read(store, 7, size)
    for name in FIELDS:
        assert found[name].dtype == wide
        assert torch.equal(found[name], torch.cat([piece[name] for piece in given_rows]).to(wide))
    only = next(store.blocks(7, 2, ["s"]))
    assert only.keys() == {"s"} and torch.equal(only["s"], found["s"][:2])


def test_log_sum_exp_and_named_fields_keep_float32(tmp_path):
    store = SampleStore.create(tmp_path, [0], {"s": (), "position": (), "q": (1,)}, full=("s", "position"))
    store.append(0, s=torch.tensor([88.12345]), position=torch.tensor([8191]), q=torch.tensor([[1 / 3]]))
    block = next(store.blocks(0, 1))
    assert block["s"].item() == torch.tensor(88.12345).item() and block["position"].item() == 8191
    assert block["q"].item() == torch.tensor(1 / 3).half().item()
    assert store.nbytes() == 4 + 4 + 2


def test_random_subset_is_uniform_ordered_and_repeatable(tmp_path):
    store = SampleStore.create(tmp_path, [0, 1], {"q": ()}, torch.float32)
    for layer in (0, 1):
        store.append(layer, q=torch.arange(10_000))
    drawn = store.sample(0, 2000, seed=1)["q"]
    assert len(drawn) == 2000 and (drawn.diff() > 0).all()
    assert torch.equal(drawn, store.sample(1, 2000, seed=1)["q"])
    assert not torch.equal(drawn, store.sample(0, 2000, seed=2)["q"])
    # Standard error of the mean of a uniform draw without replacement: 10^4 / sqrt(12 * 2000) * sqrt(.8).
    assert abs(drawn.mean().item() - 4999.5) < 4 * 58
    assert torch.equal(store.sample(0, 10**6, seed=1)["q"], torch.arange(10_000.0))


def test_bad_samples_are_refused_by_name_and_leave_nothing(tmp_path):
    store = SampleStore.create(tmp_path, [4], FIELDS)
    good = rows(3, 0)
    for change, message in [
        ({"q": good["q"].float().fill_(70000.0)}, r"q of layer 4 holds 70000, too large for float16"),
        ({"a": good["a"].float().fill_(math.nan)}, r"a of layer 4 holds NaN"),
        ({"s": good["s"].fill_(math.inf).clone()}, r"s of layer 4 holds NaN or an infinity"),
        ({"q": good["q"][:, :, :2]}, r"q of layer 4 has shape \(2, 2\) per sample, not \(2, 3\)"),
        ({"q": good["q"][:2]}, r"layer 4 have different numbers of samples: \[2, 3\]"),
        ({"k": good["q"]}, r"fields of a sample are \['a', 'q', 's'\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            store.append(4, **{**good, **change})
        good = rows(3, 0)
    assert store.count(4) == 0
    store.append(4, **good)
    assert torch.equal(read(store, 4, 2)["q"], good["q"].float())


def test_closed_and_foreign_folders_are_refused(tmp_path):
    store = SampleStore.create(tmp_path / "one", [0], FIELDS)
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.append(0, **rows(1, 0))
    with pytest.raises(FileExistsError):
        SampleStore.create(tmp_path / "one", [0], FIELDS)
    SampleStore.create(tmp_path / "two", [0, 1], FIELDS).close()
    with pytest.raises(ValueError, match="other layers or fields"):
        SampleStore.merge([tmp_path / "one", tmp_path / "two"])
    with pytest.raises(ValueError, match="no samples"):
        SampleStore.open(tmp_path / "one").sample(0, 1, 0)


def test_what_was_not_flushed_is_not_seen_by_a_reader(tmp_path):
    store = SampleStore.create(tmp_path, [0], FIELDS)
    store.append(0, **rows(2, 0))
    store.flush()
    store.append(0, **rows(3, 1))
    reader = SampleStore.open(tmp_path)
    assert reader.count(0) == 2
    assert torch.equal(read(reader, 0, 5)["s"], rows(2, 0)["s"])
    assert store.count(0) == 5


def test_reading_blocks_does_not_hold_the_store(tmp_path: Path):
    store = SampleStore.create(tmp_path, [0], {"q": (9, 64)}, torch.float16)
    for _ in range(50):
        store.append(0, q=torch.ones(1000, 9, 64, dtype=torch.float16))
    assert store.nbytes() > 50e6
    blocks = store.blocks(0, 500)
    next(blocks)
    before = psutil.Process().memory_info().rss
    peak = 0
    for _ in blocks:
        peak = max(peak, psutil.Process().memory_info().rss - before)
    assert peak < 20e6
