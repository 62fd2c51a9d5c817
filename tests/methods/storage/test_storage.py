"""KIVI and OTT on tiny models: identities, errors, bytes, padding, knobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import helpers
from helpers import QUERIES, plain_logits
from kvexp.attention.options import Options, set_options
from kvexp.cache.kv_cache import row_bytes
from kvexp.cache.quantised import QuantisedLayer
from kvexp.errors import UserError
from kvexp.methods.base import Method
from kvexp.methods.baseline.full import Full
from kvexp.methods.storage.kivi import Kivi
from kvexp.methods.storage.ott import Ott
from kvexp.tasks.batch import QueryBatch

KIVI = Kivi(group=8, residual=8)
OTT = Ott(group=8, residual=8, outliers=1, skip=0)
METHODS = [KIVI, replace(KIVI, values="blocks"), OTT]


def model(family: str = "llama") -> Any:
    return helpers.model(family, torch.float64)


def answered(method: Method, queries: Any = QUERIES, family: str = "llama", steps: int = 0) -> torch.Tensor:
    """Distributions [B, 1 + steps, V] after the queries, and after each of `steps` tokens that follow."""
    with method.attach(model(family)):
        batch = QueryBatch(model(family), method.encode(model(family), helpers.context()), queries)
        found = [batch.logits[:, None]]
        for step in range(steps):  # one token at a time, so that rows are packed in between
            ids = torch.full((len(queries), 1), 7 + step)
            columns = torch.ones(len(queries), 1, dtype=torch.bool)
            batch.columns = torch.cat([batch.columns, columns], dim=1)
            mask = batch.columns if batch.padded else None
            positions = batch.next_position + step
            found.append(batch._forward(batch.cache, ids, mask, positions, 1))
        return torch.cat(found, dim=1)


def divergence(method: Method, family: str = "llama") -> float:
    """Mean KL divergence from full attention, in nats."""
    p, q = (answered(one, family=family).log_softmax(-1) for one in (Full(), method))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3"])
def test_eight_bits_are_near_lossless(family: str) -> None:
    for method in METHODS:
        losses = [divergence(replace(method, bits=bits), family) for bits in (2, 4, 8)]
        assert losses[0] > 10 * losses[1] > 100 * losses[2] and losses[2] < 1e-4


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("residual", [0, 8, 11])
def test_ott_without_outliers_is_kivi_in_blocks(bits: Any, residual: int) -> None:
    kivi = Kivi(bits=bits, group=8, residual=residual, values="blocks")
    ott = Ott(bits=bits, group=8, residual=residual, outliers=0)
    assert torch.equal(answered(kivi, steps=10), answered(ott, steps=10))
    skipped = Ott(bits=bits, group=8, residual=residual, outliers=2, skip=100)
    assert torch.equal(answered(kivi, steps=10), answered(skipped, steps=10))
    assert not torch.equal(answered(kivi), answered(replace(skipped, skip=1)))


@pytest.mark.parametrize("method", METHODS)
def test_a_padded_batch_equals_each_alone_while_rows_are_packed(method: Method) -> None:
    together = answered(method, steps=20)
    for row, query in enumerate(QUERIES):
        alone = answered(method, [query], steps=20)[0]
        torch.testing.assert_close(together[row], alone, atol=1e-9, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_contexts_of_a_batch_are_packed_as_each_alone(method: Method) -> None:
    contexts = [helpers.context(chunks, seed=chunks) for chunks in (6, 4, 5)]
    together = method.encode(model(), contexts)
    assert together.batch == 3 and together.entries() == [45] * 3
    with method.attach(model()):
        ours = QueryBatch(model(), together, QUERIES).logits
        for row, (one, query) in enumerate(zip(contexts, QUERIES, strict=True)):
            alone = QueryBatch(model(), method.encode(model(), one), [query]).logits[0]
            torch.testing.assert_close(ours[row], alone, atol=1e-9, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_the_context_is_read_in_full_and_then_packed(method: Method) -> None:
    """In whatever chunks it is read; `prefill=chunks` packs in between, which tells."""
    whole = answered(method)
    set_options(model(), Options(prefill_chunk=5))
    try:
        parts, packed_between = answered(method), answered(replace(method, prefill="chunks"))
    finally:
        set_options(model(), Options())
    torch.testing.assert_close(parts, whole, atol=1e-9, rtol=0)
    assert not torch.allclose(packed_between, whole, atol=1e-3)
    assert torch.equal(answered(replace(method, prefill="chunks")), whole)  # one chunk holds all


def test_decode_false_leaves_what_follows_in_full() -> None:
    counters = []
    for decode in (True, False):
        method = replace(KIVI, decode=decode)
        for prefill in ("end", "chunks"):
            cache = replace(method, prefill=prefill).encode(model(), helpers.context())
            with method.attach(model()):
                QueryBatch(model(), cache, QUERIES[1:2]).generate(4, lambda made: None)
            counters.append(cache.counters["quantised"])
    packed = 3 * (45 - 8)  # values of the context, in three layers
    assert counters[2:] == [packed, packed]
    # Nine tokens of the query and three of the answer follow (the fourth is never fed).
    assert counters[:2] == [packed + 3 * 12] * 2


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_bytes_of_a_long_context(bits: Any) -> None:
    family = helpers.model("llama")  # 3 layers, 2 KV heads of 16 channels, float32
    method = Kivi(bits=bits, group=16, residual=32)
    ids = helpers.tokens(300)
    cache = method.encode(family, ids)
    # 288 keys and 268 values are packed, each with a scale and a minimum for 16 numbers.
    packed = (288 + 268) * 16 * bits // 8 + (288 + 268) * 4
    newest = (12 + 32) * 16 * 4
    assert cache.nbytes() == cache.sequence_bytes() == 3 * 2 * (packed + newest)
    assert cache.nbytes() < 300 * row_bytes(family) * (bits + 2.1 + 2.4) / 32
    assert cache.entries() == [300] * 3


def test_outliers_are_the_smallest_keys_of_their_head() -> None:
    cache = OTT.encode(model(), helpers.context())
    full = Full().encode(model(), helpers.context())
    for layer, dense in zip(cache.layers, full.layers, strict=True):
        assert isinstance(layer, QuantisedLayer)
        (lane,) = layer.lanes
        assert lane.outliers is not None
        sizes = dense.keys.abs().sum(-1)[0, :, :32]  # four blocks of eight; eight and the rest are in full
        for h in range(2):
            active = lane.outliers.rows[0, h][lane.outliers.active[0, h]].tolist()
            assert active == [int(sizes[h].argmin())]


def test_ott_helps_where_few_keys_are_small() -> None:
    """The case it was made for: channels are uniform but for one token with keys near zero."""
    numbers = torch.Generator().manual_seed(0)
    keys = 20 + torch.randn(1, 2, 128, 16, generator=numbers)
    keys[:, :, 40] *= 0.01
    values = torch.randn(1, 2, 128, 16, generator=numbers)
    errors = [
        (method.packed(keys, values, 5).restored(torch.float32)[0] - keys).norm().item()
        for method in (Kivi(group=128, residual=128), Ott())
    ]
    assert errors[1] < errors[0] / 4


def test_two_questions_on_one_cache_and_a_prompt_shorter_than_the_residual() -> None:
    for method in (Kivi(), Ott()):
        ours = answered(method)  # 45 + 9 rows: Kivi holds all in full, Ott waits for 160
        for row, query in enumerate(QUERIES):
            full = plain_logits(model(), [*helpers.context().ids, *query])[-1]
            torch.testing.assert_close(ours[row, 0], full, atol=1e-5, rtol=0)
    cache = KIVI.encode(model(), helpers.context())
    with KIVI.attach(model()):
        first = QueryBatch(model(), cache, QUERIES[:1]).logits
        QueryBatch(model(), cache, QUERIES[1:]).generate(12, lambda made: None)
        assert torch.equal(QueryBatch(model(), cache, QUERIES[:1]).logits, first)


@pytest.mark.parametrize("method", [KIVI, OTT])
def test_an_empty_context(method: Method) -> None:
    cache = method.encode(model(), [])
    with method.attach(model()):
        logits = QueryBatch(model(), cache, QUERIES[:1]).logits[0]
    torch.testing.assert_close(logits, plain_logits(model(), QUERIES[0])[-1], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Kivi(residual=100), "method.residual=100 is no multiple of method.group=32.*=96"),
        (lambda: Kivi(residual=0), "use method.residual=32"),
        (lambda: Kivi(group=0), "method.group=0 is no number of values: use 1 or more"),
        (lambda: Ott(residual=-1), "method.residual=-1 is no number of rows: use 0 or more"),
        (lambda: Ott(outliers=128), "method.outliers=128 leaves no other token in a block of"),
        (lambda: Ott(pool=-1), "method.pool=-1 is no count: use 0 or more"),
        (lambda: Ott(skip=-2), "method.skip=-2 is no count"),
    ],
)
def test_knobs_that_make_no_sense(make: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make()


def test_defaults_are_those_of_the_papers() -> None:
    assert (Kivi().bits, Kivi().group, Kivi().residual, Kivi().values) == (2, 32, 128, "rows")
    assert (Ott().group, Ott().residual, Ott().outliers, Ott().pool, Ott().skip) == (128, 32, 3, 32, 2)
    assert [Ott().scheme(layer).outliers for layer in range(4)] == [0, 0, 3, 3]
