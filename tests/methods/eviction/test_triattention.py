from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import helpers
from evict import PROMPTS, Event, by_hand, each_setting, hold, watched
from kvexp.attention.bands import Bands
from kvexp.budget import Budget
from kvexp.errors import UserError
from kvexp.methods.eviction.query_statistics import QueryStatistics
from kvexp.methods.eviction.triattention import TriAttention
from kvexp.methods.eviction.triattention_plus import TriAttentionPlus
from kvexp.stats.moments import Moments
from kvexp.tasks.batch import QueryBatch
from triattention_reference import Slow, statistics

MODES = ("per_head", "per_layer_perhead", "union")


BATCHES = (PROMPTS[:1], PROMPTS)


def check(
    method: TriAttention,
    family: str,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    budget: int = 12,
    new: int = 10,
    batches: Any = BATCHES,
) -> list[list[Event]]:
    """Hold a method against the reference; return the last batch's events."""
    memory = statistics(family, folder, dtype)
    for prompts in batches:
        events = watched(method, family, prompts, budget, new, dtype, memory)
        assert len(events) == len(prompts)
        for sequence in events:
            assert hold(sequence, Slow(method, family, budget, dtype)) >= 2
    return events


@each_setting
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("mode", MODES)
def test_keeps_what_the_reference_keeps(mode: Any, family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    check(TriAttention(interval=4, mode=mode), family, tmp_path, dtype)


VARIANTS: dict[str, dict[str, Any]] = {
    "cosines": {"form": "cosines"},
    "largest": {"form": "cosines", "aggregate": "max", "max_offset": 128},
    "linear": {"offsets": "linear"},
    "short": {"max_offset": 128},
    "smooth": {"gain": "smooth"},
    "no-trig": {"trig": False},
    "no-norm": {"norm": "none"},
    "unweighted": {"norm": "unweighted"},
    "variance": {"norm": "variance"},
    "values": {"norm": "variance", "value_norm": True},
    "mean": {"group": "mean"},
    "window": {"mix": "window", "window": 6},
    "window-mean": {"mix": "window", "window": 3, "mix_by": "mean", "mode": "union"},
    "accumulated": {"mix": "accumulated"},
    "accumulated-mean": {"mix": "accumulated", "mix_by": "mean", "mode": "per_layer_perhead"},
    "ema": {"ema": 0.1},
    "protected": {"sinks": 2, "recent": 3, "mode": "per_layer_perhead"},
    "turns": {"smooth": True, "mode": "per_layer_perhead"},
    "query-aware": {"query_aware": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_keep_what_the_reference_keeps(name: str, tmp_path: Path) -> None:
    check(TriAttention(interval=4, **VARIANTS[name]), "llama", tmp_path, new=6, batches=(PROMPTS,))


def test_the_prompt_stays_where_the_budget_holds_it(tmp_path: Path) -> None:
    """Prompts of 29 and 35 tokens fit into 37 rows, one of 40 competes."""
    method = TriAttention(interval=3, mode="per_layer_perhead")
    events = check(method, "qwen3", tmp_path, budget=37, new=20, batches=(PROMPTS,))
    for sequence, length in zip(events, (40, 29, 35), strict=True):
        kept = sequence[-1].kept[0]
        assert (kept[:length] == list(range(length))) == (length < 37)


def test_a_prompt_that_competes_is_counted_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, memory = helpers.model("llama"), statistics("llama", tmp_path)
    method = TriAttention(interval=4)
    with caplog.at_level(logging.WARNING, logger="kvexp.methods.eviction.triattention"):
        cache = method.encode(model, helpers.tokens(30), memory, 20)
        with method.attach(model, memory):
            QueryBatch(model, cache, [helpers.tokens(3)]).generate(10, lambda made: None)
    assert cache.counters["prompt_competed"] == 4  # at the end of the prompt, then at 24, 24 and 24 rows
    assert len(caplog.records) == 1 and "longer than the budget of 20 rows" in caplog.text
    plain = replace(method, protect_prompt=False).encode(model, helpers.tokens(30), memory, 20)
    assert "prompt_competed" not in plain.counters
    fits = method.encode(model, helpers.tokens(10), memory, 20)
    with method.attach(model, memory):
        QueryBatch(model, fits, [helpers.tokens(3)]).generate(20, lambda made: None)
    assert fits.counters["evicted"] > 0 and "prompt_competed" not in fits.counters


def layers_hold(method: TriAttention, rows: int, folder: Path) -> tuple[list[int], Any]:
    memory = statistics("llama", folder)
    return method.encode(helpers.model("llama"), helpers.tokens(80), memory, rows).entries(), memory


def test_layers_whose_queries_spread_more_hold_more(tmp_path: Path) -> None:
    """Three layers share 3 * 20 rows: 10 each, and 30 in proportion to 1 - R, to the largest remainders."""
    method = TriAttention(mode="per_layer_perhead", budgets="concentration")
    held, memory = layers_hold(method, 20, tmp_path)
    spread = [1 - r for r in memory.concentrations()]
    assert sum(held) == 60
    for rows, one in zip(held, spread, strict=True):
        assert abs(rows - (10 + 30 * one / sum(spread))) < 1
    assert layers_hold(method, 80, tmp_path / "all")[0] == [80, 80, 80]


def test_heads_of_all_layers_agree_as_the_mode_says(tmp_path: Path) -> None:
    memory = statistics("llama", tmp_path)
    for mode, sets in (("per_layer_perhead", 6), ("per_head", 2), ("union", 1)):
        [events] = watched(TriAttention(mode=mode), "llama", PROMPTS[:1], 12, 0, memory=memory)  # type: ignore[arg-type]
        kept = {tuple(head) for event in events if event.reading for head in event.kept}
        assert len(kept) == sets


def one_head(mean: complex, size: float, square: float = 0.0, turn: float = torch.pi / 2) -> QueryStatistics:
    """Statistics of one head with one band that turns by `turn` a token."""
    none = torch.zeros(1, 0, dtype=torch.float64)
    moments = Moments(
        torch.tensor([[mean]], dtype=torch.complex128),
        torch.tensor([[size]], dtype=torch.float64),
        torch.tensor([[square]], dtype=torch.float64),
        *(none, none, none),
    )
    return QueryStatistics({0: moments}, {0: Bands(torch.tensor([turn], dtype=torch.float64))})


KEYS = torch.tensor([[[2.0, 0.0], [0.0, 3.0], [-4.0, 0.0]]])  # rotated, as cached: 2, 3i and -4
STEP = (KEYS, KEYS, KEYS)


def test_by_hand_the_expected_query_chooses() -> None:
    """The mean query 1 is expected one token after position 3, turned by 4 quarters: again 1. Its products
    with the keys 2, 3i and -4 are 2, 0 and -4. One token later it is i, and the products are 0, 3 and 0; the
    new key -5i gives -5. A mean query of i points at 3i, then at -4."""
    method = TriAttention(max_offset=1, interval=1, protect_prompt=False)
    assert by_hand(method, [STEP], 1, one_head(1, 1)) == [[0]]
    assert by_hand(method, [STEP], 2, one_head(1, 1)) == [[0, 1]]
    assert by_hand(method, [STEP], 1, one_head(1j, 1)) == [[1]]
    new = torch.tensor([[[0.0, -5.0]]])
    assert by_hand(method, [STEP, (new, new, new)], 2, one_head(1, 1)) == [[0, 1]]
    new = torch.tensor([[[0.0, 5.0]]])
    assert by_hand(method, [STEP, (new, new, new)], 2, one_head(1, 1)) == [[1, 3]]


def test_by_hand_offsets_may_cancel() -> None:
    """One and two tokens ahead of position 3, a mean query of 1 is 1 and i: 2, 3i and -4 give the means
    (2 + 0) / 2, (0 + 3) / 2 and -2, the largest 2, 3 and 0. With half a turn a token, they cancel: of equal
    scores the first rows stay."""
    method = TriAttention(max_offset=2, protect_prompt=False)
    assert by_hand(method, [STEP], 1, one_head(1, 1)) == [[1]]
    assert by_hand(replace(method, form="cosines", aggregate="max"), [STEP], 2, one_head(1, 1)) == [[0, 1]]
    assert by_hand(method, [STEP], 2, one_head(1, 1, turn=torch.pi)) == [[0, 1]]


def test_by_hand_norms_decide_where_queries_have_no_direction() -> None:
    """Mean 0: the longest keys, -4 and 3i, stay. With mean 1 and size 1.5 the norm adds 0.5 |k|: 2 + 1,
    0 + 1.5, -4 + 2. Unweighted it adds 1.5 |k|: 5, 4.5, 2. Spread 3 (square 4) adds 3/4 |k|^2 at scale 1:
    2 + 3, 0 + 6.75, -4 + 12."""
    method = TriAttention(max_offset=1, protect_prompt=False)
    assert by_hand(method, [STEP], 2, one_head(0, 1)) == [[1, 2]]
    assert by_hand(method, [STEP], 1, one_head(1, 1.5)) == [[0]]
    assert by_hand(replace(method, norm="variance"), [STEP], 1, one_head(1, 1.5, 4)) == [[2]]
    assert by_hand(replace(method, norm="variance"), [STEP], 2, one_head(1, 1.5, 4)) == [[1, 2]]


def test_a_memory_is_needed() -> None:
    with pytest.raises(UserError, match="needs query statistics"):
        TriAttention().encode(helpers.model("llama"), helpers.tokens(9), None, 5)


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"max_offset": 0}, "max_offset=0 is no number of tokens"),
        ({"window": 0}, "window=0 is no number of tokens"),
        ({"ema": 1.0}, "ema=1.0 is no share"),
        ({"trig": False, "norm": "none"}, "leaves nothing to score by"),
        ({"aggregate": "max"}, "add method.form=cosines"),
        ({"gain": "smooth", "form": "cosines"}, "use method.form=dot"),
        ({"budgets": "concentration"}, "add method.mode=per_layer_perhead"),
        ({"smooth": True}, "set another mode"),
        ({"sinks": -1}, "sinks=-1"),
    ],
)
def test_knobs_that_make_no_sense_are_refused(knobs: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        TriAttention(**knobs)


def test_the_other_defaults_are_all_that_plus_changes(tmp_path: Path) -> None:
    plus = TriAttentionPlus()
    same = TriAttention(sinks=4, recent=128, protect_prompt=False, mode="per_layer_perhead", norm="variance")
    assert vars(plus) == vars(same)
    assert (plus.smallest_budget(), TriAttention().smallest_budget()) == (133, 1)
    small = TriAttentionPlus(interval=4, recent=5, sinks=2)
    check(small, "llama", tmp_path, batches=(PROMPTS,))
    with pytest.raises(UserError, match="budget=133 or more"):
        plus.check_budget(Budget(132))
