from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from kvexp.errors import UserError
from kvexp.stats.samples import SampleStore


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """Queries of 2,000 tokens, six heads over two KV heads, near one of 300 directions."""
    g = torch.Generator().manual_seed(0)
    some = torch.randn(300, 6, 16, generator=g)[torch.randint(300, (2000,), generator=g)]
    store = SampleStore.create(tmp_path / "samples" / "rank-000", [0], {"q": (6, 16)}, torch.float32)
    store.append(0, q=some + 0.2 * torch.randn(2000, 6, 16, generator=g))
    store.close()
    return tmp_path / "samples"


def test_a_step_is_attention_merged_with_what_was_looked_up(part, samples, tmp_path) -> None:
    pytest.importorskip("faiss")
    bench = part("attention")
    store = SampleStore.merge(sorted(samples.glob("rank-*")))
    books = [bench.Books(store, 2, 0, "pooled", 256, tmp_path)]
    assert books[0].keys.shape == (2, 256, 16) and books[0].cells == 8
    probe, recall, share = bench.chosen(books, 0.95)
    assert 1 <= probe <= 8 and recall > 0.9 and probe / 8 * 0.3 < share < 1.1
    ways = bench.steps(books, 8, 5)
    assert ways["sdpa"](0).shape == (1, 6, 1, 16) and ways["folded"](0).shape == (1, 2, 3, 16)
    lookup = books[0].lookup("flat", 8)
    for way in ("two_level", "ivf"):
        x = books[0].samples(books[0].test)
        assert torch.equal(books[0].lookup(way, 8).nearest(x), lookup.nearest(x)), "all cells are searched"
        assert ways[way](0).shape == (1, 6, 1, 16)


def test_keys_beyond_the_real_ones_have_the_spread_of_samples(part) -> None:
    bench = part("attention")
    g = torch.Generator().manual_seed(0)
    c = F.normalize(torch.randn(20, 8, generator=g), dim=-1) * 10
    x = c[torch.randint(20, (4000,), generator=g)] + 0.1 * torch.randn(4000, 8, generator=g)
    keys = bench.resampled(c, x, 2000)
    offset = keys - c[torch.arange(2000) % 20]
    assert keys.shape == (2000, 8)
    assert offset.std() == pytest.approx(0.1, rel=0.05)
    assert torch.equal(bench.resampled(c, x, 20), c)


def test_exponents_are_slopes_in_logarithms(part) -> None:
    bench = part("attention")
    rows = [
        {"layout": "pooled", "length": k, "us": {"sdpa": [0, 2.0 * k, 0], "ivf": [0, 5.0 * k**0.5, 0]}}
        for k in (1024, 4096, 8192)
    ]
    found = bench.exponents([*rows, {**rows[0], "layout": "group"}])
    assert found["pooled"] == pytest.approx({"sdpa": 1.0, "ivf": 0.5}) and "group" not in found


def test_what_was_found_is_printed_and_written(part, samples, tmp_path, capsys) -> None:
    pytest.importorskip("faiss")
    bench = part("attention")
    words = [f"samples={samples}", "layouts=pooled", "lengths=64,128", "layers=0", "rounds=2", "kv_heads=2"]
    assert bench.main([*words, f"output_dir={tmp_path}"]) == 0
    found = json.loads((tmp_path / "bench" / "attention" / "found.json").read_text())
    assert [row["length"] for row in found["rows"]] == [64, 128]
    assert set(found["rows"][0]["us"]) == {"sdpa", "folded", "flat", "two_level", "ivf"}
    assert "K = 128 real" in capsys.readouterr().out
    with pytest.raises(UserError, match="samples is needed"):
        bench.main(["rounds=2"])


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("samples=no/such/folder", "samples=no/such/folder holds no samples"),
        ("layouts=pooled,nope", "there is no layout 'nope'. Layouts: pooled, pairs, group, shared"),
        ("layouts=poled", "did you mean 'pooled'?"),
        ("lengths=64,x", "lengths=64,x is not numbers from 32"),
        ("lengths=16", "lengths=16 is not numbers from 32"),
        ("rounds=1", "rounds=1 is not a number from 2"),
        ("recall=2", "recall=2 is no share"),
        ("layers=0,7", "has no layer 7: write layers= with some of 0"),
        ("kv_heads=4", "kv_heads=4 does not divide the 6 query heads"),
        ("output_dir=/dev/null", "output_dir=/dev/null cannot be written to"),
    ],
)
def test_words_that_cannot_be_measured(part, samples, tmp_path, word, told) -> None:
    words = [f"samples={samples}", "layers=0", "kv_heads=2", f"output_dir={tmp_path}", word]
    with pytest.raises(UserError, match=told.replace("?", "[?]")):
        part("attention_words").words_of(words)


def test_a_folder_without_samples_and_one_that_is_damaged(part, samples, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty holds no samples"):
        part("attention_words").words_of([f"samples={tmp_path / 'empty'}"])
    (samples / "rank-000" / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="samples cannot be read"):
        part("attention_words").words_of([f"samples={samples}"])
