"""Where units are encoded, and what comes out of the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import helpers
from helpers import FAMILIES
from kvexp.attention.options import Options, set_options
from kvexp.errors import UserError
from kvexp.methods.reuse.agentkvshift import AgentKVShift
from kvexp.methods.reuse.report import Report
from kvexp.methods.reuse.reposition import Reposition
from kvexp.methods.reuse.units import Encoder, earlier
from kvexp.prompt import Context

CONTEXT = helpers.context(6, 7, 3)
UNIT = helpers.tokens(15, seed=4)  # longer than a window of 8


@torch.no_grad()
def plain(family: str, ids: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What each layer of an ordinary model caches of a text, [H, n, D]; sliding layers too."""
    cache = DynamicCache()  # without a configuration it keeps everything
    helpers.model(family)(torch.tensor([ids]), cache=cache)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def made(family: str, store: Any = None) -> Encoder:
    model = helpers.model(family)
    return Encoder(model, store or Reposition().opened(model))


def check(chunk: Any, rows: list[tuple[torch.Tensor, torch.Tensor]], start: int, length: int) -> None:
    assert (chunk.start, chunk.length) == (start, length)
    for layer, (keys, values) in enumerate(rows):
        span = slice(start, start + length)
        ours = chunk.rows(layer)
        torch.testing.assert_close(ours[0], keys[:, span], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(ours[1], values[:, span], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1024, 4])
def test_a_unit_is_encoded_behind_its_prefix_and_no_other(family: str, chunk: int) -> None:
    header, method = CONTEXT.header, Reposition()
    set_options(helpers.model(family), Options(prefill_chunk=chunk))
    try:
        with method.attach(helpers.model(family)):
            encoder = made(family)
            behind, alone = encoder.behind(header, UNIT), encoder.alone(UNIT)
            first, second = encoder.together(header, [CONTEXT.chunks[0], UNIT])
    finally:
        set_options(helpers.model(family), Options())
    check(behind, plain(family, [*header, *UNIT]), 3, 15)
    check(alone, plain(family, list(UNIT)), 0, 15)
    old = plain(family, [*header, *CONTEXT.chunks[0], *UNIT])
    check(first, old, 3, 7)
    check(second, old, 10, 15)


def test_what_is_in_the_store_is_not_encoded_again() -> None:
    method = Reposition()
    with method.attach(helpers.model("llama")):
        encoder = made("llama")
        one = encoder.behind(CONTEXT.header, UNIT)
        assert encoder.behind(CONTEXT.header, UNIT) is one
        assert encoder.behind((), UNIT) is encoder.alone(UNIT) is not one
        pair = encoder.together(CONTEXT.header, [UNIT, CONTEXT.chunks[0]])
        assert encoder.together(CONTEXT.header, [UNIT, CONTEXT.chunks[0]])[1] is pair[1]
        assert pair[0] is one or pair[0].start == one.start  # the same prefix: one entry


def test_only_units_that_are_placed_are_counted() -> None:
    """Not a header, and not a look-up of which nothing is placed."""
    header, first, second = CONTEXT.header, CONTEXT.chunks[0], CONTEXT.chunks[1]
    with Reposition().attach(helpers.model("llama")):
        encoder = made("llama")

        def counts() -> tuple[int, int, int]:
            report = Report(3, 1)
            encoder.report(report)
            return report.hits, report.misses, report.found

        encoder.header(header)
        encoder.header(header)
        assert counts() == (0, 0, 0)
        encoder.together(header, [UNIT, first])
        assert counts() == (0, 2, 0)
        encoder.together(header, [UNIT, first])
        assert counts() == (2, 2, 15 + len(first))
        encoder.together(header, [UNIT, first, second])  # two are there, and are encoded with the third again
        assert counts() == (2, 5, 15 + len(first))
        encoder.behind(header, UNIT)  # the first of them stood behind the header alone
        assert counts() == (3, 5, 30 + len(first))


def test_earlier_prompts_hold_units_in_an_order_of_their_own() -> None:
    groups = earlier(CONTEXT, 4)
    assert sorted(i for group in groups for i in group) == list(range(6))
    assert [len(group) for group in groups] == [4, 2]
    turned = Context(CONTEXT.header, tuple(reversed(CONTEXT.chunks)))
    assert [[5 - i for i in group] for group in earlier(turned, 4)] == groups
    assert earlier(Context((), ((1, 2), (), (3,))), 5) in ([[0, 2]], [[2, 0]])


def test_modes_differ_in_what_is_stale() -> None:
    found = {}
    for mode in ("behind_header", "alone", "old_context"):
        cache = Reposition(encoded=mode).encode(helpers.model("llama"), CONTEXT)  # type: ignore[arg-type]
        found[mode] = cache.layers[2].keys
        assert cache.counters["reused"] == 3 * 42 and cache.counters["recomputed"] == 0
    names = list(found)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert not torch.allclose(found[one], found[other], atol=1e-2)


def test_a_store_on_disk_serves_the_next_run(tmp_path: Path) -> None:
    model, method = helpers.model("llama"), AgentKVShift(store="disk")
    with pytest.raises(UserError, match=r"store=disk needs a folder"):
        method.opened(model)
    first: Any = method.encode(model, CONTEXT, method.opened(model, tmp_path, "ab"))
    again: Any = method.encode(model, CONTEXT, method.opened(model, tmp_path, "ab"))
    assert (first.report.misses, again.report.misses, again.report.hits) == (6, 0, 6)
    for mine, theirs in zip(again.layers, first.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
    [data, *_] = tmp_path.rglob("*.safetensors")
    data.write_bytes(data.read_bytes()[:-9])
    mended: Any = method.encode(model, CONTEXT, method.opened(model, tmp_path, "ab"))
    assert mended.report.misses == 1
    assert torch.equal(mended.layers[2].keys, first.layers[2].keys)


def test_without_a_store_nothing_outlives_a_call() -> None:
    model, method = helpers.model("llama"), Reposition()
    reports: list[Any] = [method.encode(model, CONTEXT) for _ in range(2)]
    assert [one.report.misses for one in reports] == [6, 6]
    with pytest.raises(UserError, match="another model"):
        method.encode(helpers.model("qwen3"), CONTEXT, method.opened(model))
