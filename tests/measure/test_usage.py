"""The cache section of a record, against sizes worked out by hand from the tiny models' configurations."""

from __future__ import annotations

from pathlib import Path

import pytest

import helpers
from helpers import QUERIES, Calibration
from kvexp.budget import Budget
from kvexp.measure.usage import cache_usage, shares, total_usage
from kvexp.methods.baseline.full import Full
from kvexp.methods.baseline.no_context import NoContext
from kvexp.methods.baseline.truncate import Truncate
from kvexp.methods.memory.asm import ASM
from kvexp.report.record import COUNTERS, STORAGE
from kvexp.tasks.batch import QueryBatch

CONTEXT = helpers.context()  # a header of 3 tokens and 6 chunks of 7
ROW = {
    "llama": 3 * 2 * 2 * 16 * 4,  # layers, K and V, KV heads, head dim, bytes of float32
    "gpt_oss": 1 * 2 * 2 * 16 * 4,  # the other layer is a sliding one
    "deepseek_v3": 2 * (16 + 8) * 4,  # latents and the rotary key
}


SIZES = {"bytes_peak": 10, "bytes_full": 20, "kv_token_equivalents": 1.0, "entries_nominal": 4}
SIZES |= {"context_tokens": 9, "entries_peak": 4, "entries_mean": 4.0}


@pytest.mark.parametrize("family", ROW)
def test_full_holds_the_whole_context(family: str) -> None:
    model = helpers.model(family)
    cache = Full().encode(model, CONTEXT)
    sliding = (
        7 * ROW["gpt_oss"] if family == "gpt_oss" else 0
    )  # a window of 8: 7 rows and the next token's own
    assert cache_usage(model, cache, len(CONTEXT), 45) == {
        "context_tokens": 45,
        "entries_nominal": 45,
        "entries_peak": 45,
        "entries_mean": 45.0,
        "bytes_peak": 45 * ROW[family] + sliding,
        "bytes_full": 45 * ROW[family] + sliding,
        "kv_token_equivalents": 45.0,
    }


def test_a_part_of_the_context_holds_its_part() -> None:
    model = helpers.model("llama")
    cut = cache_usage(model, Truncate().encode(model, CONTEXT, None, Budget(20)), 45, 20)
    assert (cut["entries_peak"], cut["bytes_peak"], cut["kv_token_equivalents"]) == (
        17,
        17 * ROW["llama"],
        17.0,
    )
    assert cut["bytes_full"] == 45 * ROW["llama"]
    bare = cache_usage(model, NoContext().encode(model, CONTEXT), 45, 3)
    assert (bare["entries_peak"], bare["entries_mean"], bare["bytes_peak"]) == (3, 3.0, 3 * ROW["llama"])


def test_queries_on_forks_add_nothing() -> None:
    model, method = helpers.model("llama"), Full()
    cache = method.encode(model, CONTEXT)
    before = cache_usage(model, cache, 45, 45)
    with method.attach(model):
        QueryBatch(model, cache, QUERIES).generate(4, lambda made: None)
    assert cache_usage(model, cache, 45, 45) == before


def test_a_memory_counts_its_entries_bytes_and_lookups(tmp_path: Path) -> None:
    model, method, budget = helpers.model("llama"), ASM(layout="pooled", aggregate="mean"), Budget(8)
    traces = [helpers.tokens(9, seed) for seed in range(12)]
    memory = method.prepare(model, Calibration(CONTEXT, traces, tmp_path), budget)
    cache = method.encode(model, CONTEXT, memory, budget)
    with method.attach(model, memory):
        QueryBatch(model, cache, QUERIES)
    usage = cache_usage(model, cache, 45, 8)
    assert usage["entries_peak"] == 8 and usage["entries_mean"] == 8.0
    assert usage["bytes_peak"] == memory.nbytes()
    assert usage["kv_token_equivalents"] == round(memory.nbytes() / ROW["llama"], 1)
    assert usage["looked_up"] == 3 * sum(map(len, QUERIES))  # each real query token once in each layer
    assert set(usage) <= {*STORAGE, *COUNTERS}


def test_shares_of_reuse_are_over_all_contexts() -> None:
    counters = {"reusable": 300, "unit_tokens": 100, "recomputed": 45, "union": 19, "found": 60}
    assert shares(counters) == {"recomputed_share": 0.15, "union_share": 0.19, "hit_rate": 0.6}
    assert total_usage([{**SIZES, **counters}])["union_share"] == 0.19
    assert shares({"evicted": 3}) == {} and shares({"reusable": 0, "unit_tokens": 0}) == {}


def test_counters_of_several_caches_are_the_last_ones_and_peaks_the_largest() -> None:
    """A counter that one method alone has goes on as well, whichever context was the longest."""
    longest = {**SIZES, "entries_peak_prompt": 9}
    last = {**SIZES, "context_tokens": 8, "entries_peak": 6, "entries_mean": 5.0, "entries_peak_prompt": 12}
    parts = [
        {**longest, "evicted": 3, "prompt_competed": 1},
        {**last, "evicted": 5, "prompt_competed": 2, "looked_up": 7},
    ]
    total = total_usage(parts)
    assert (total["context_tokens"], total["entries_mean"]) == (9, 4.5)
    assert (total["entries_peak"], total["entries_peak_prompt"]) == (6, 12)
    assert (total["evicted"], total["prompt_competed"], total["looked_up"]) == (5, 2, 7)
