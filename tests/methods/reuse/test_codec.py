"""Stores in few bits: what comes back, how many bytes are held, and that headers stay exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import helpers
from kvexp.errors import UserError
from kvexp.methods.reuse.agentkvshift import AgentKVShift
from kvexp.methods.reuse.prefix_cache import PrefixCache
from kvexp.methods.reuse.reposition import Reposition
from kvexp.methods.storage.kivi import Kivi
from kvexp.methods.storage.ott import Ott
from kvexp.prompt import Context

IDS = helpers.tokens(200, seed=5)
CONTEXT = Context(IDS[:6], (IDS[6:70], IDS[70:134], IDS[134:198]))


def reused(method: Any, family: str = "llama", store: Any = None) -> Any:
    return method.encode(helpers.model(family), CONTEXT, store)


def distance(one: Any, other: Any, part: slice) -> float:
    """The largest relative error of a layer's keys and values."""
    found = []
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            if a.shape[2] == len(CONTEXT):
                found.append(((a - b)[:, :, part].norm() / b[:, :, part].norm()).item())
    return max(found)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_fewer_bits_err_more_and_eight_hardly(family: str) -> None:
    exact = reused(Reposition(), family)
    units = slice(6, None)
    errors = {
        bits: distance(reused(Reposition(stored=Kivi(bits=bits)), family), exact, units) for bits in (8, 4, 2)
    }
    assert errors[8] < 0.01 < errors[4] < 0.15 < errors[2] < 0.8
    assert distance(reused(Reposition(stored=Ott(bits=2)), family), exact, units) > 0.01


def test_headers_are_exact_whatever_units_are() -> None:
    exact = reused(Reposition())
    assert distance(reused(Reposition(stored=Kivi(bits=2))), exact, slice(0, 6)) == 0.0


def test_a_packed_store_is_smaller_in_memory_and_on_disk(tmp_path: Path) -> None:
    model, sizes = helpers.model("llama"), {}
    for name, stored in (("exact", None), ("packed", Kivi(bits=2))):
        knobs = {} if stored is None else {"stored": stored}
        method = Reposition(store="disk", **knobs)  # type: ignore[arg-type]
        store = method.opened(model, tmp_path / name, "ab")
        first = reused(method, store=store)
        sizes[name] = store.nbytes()
        again = reused(method, store=method.opened(model, tmp_path / name, "ab"))
        assert again.report.misses == 0
        assert again.report.moved_bytes == sizes[name]  # each chunk is placed once, and read as it is stored
        assert torch.equal(again.layers[2].keys, first.layers[2].keys)
    rows = 3 * 2 * 2 * 16  # layers, keys and values, heads, numbers of a token
    assert sizes["exact"] == 198 * rows * 4
    # Two bits a number, a scale and a minimum of two bytes each for every 32 keys of a channel and for the
    # 16 values of a token, and two int64 a layer that say how wide they are; the header in full.
    packed = 192 * rows // 4 + 192 * rows // 2 * (4 / 32 + 4 / 16) + 3 * 3 * 16
    assert sizes["packed"] == packed + 6 * rows * 4


def test_probes_are_fresh_and_a_share_of_one_is_full() -> None:
    """Tokens that are recomputed are in full precision, whatever the store has."""
    stored = Kivi(bits=2)
    full = reused(AgentKVShift(recompute="1"))
    assert distance(reused(AgentKVShift(recompute="1", stored=stored)), full, slice(0, None)) < 1e-5
    half = reused(AgentKVShift(recompute="0.5", stored=stored))
    assert half.report.union > 96 and half.counters["reused"] > 0


def test_a_store_of_other_rows_than_the_method_wants_is_refused() -> None:
    model = helpers.model("llama")
    exact, two, four = Reposition(), Reposition(stored=Kivi(bits=2)), Reposition(stored=Kivi(bits=4))
    named = r"this chunk store holds rows as {}.*, and this reposition wants them as {}.*: open one with"
    for method, opened, holds, wants in (
        (two, exact, "exact", r"kivi\(bits=2"),
        (exact, two, r"kivi\(bits=2", "exact"),
        (two, four, r"kivi\(bits=4", r"kivi\(bits=2"),
    ):
        with pytest.raises(UserError, match=named.format(holds, wants)):
            reused(method, store=opened.opened(model))
    with pytest.raises(UserError, match=r"holds rows as kivi.*, and this prefix_cache wants them as exact"):
        reused(PrefixCache(), store=two.opened(model))
    assert torch.equal(reused(two, store=two.opened(model)).layers[0].keys, reused(two).layers[0].keys)
    with pytest.raises(UserError, match=r"memory='foo' is no chunk store: open one with method\.opened"):
        reused(exact, store="foo")
    with pytest.raises(UserError, match="opened for another model"):
        reused(exact, store=exact.opened(helpers.model("qwen3")))


def test_another_number_of_bits_is_another_entry() -> None:
    model = helpers.model("llama")
    names = {
        Reposition(stored=stored).opened(model).key((1,), (2,))
        for stored in (Kivi(bits=2), Kivi(bits=4), Kivi(bits=2, group=64), Ott(bits=2))
    }
    assert len(names) == 4
