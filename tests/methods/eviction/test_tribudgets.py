"""Rows of layers and heads in proportion to how little the mean says of their queries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import helpers
from evict import PROMPTS, Event, by_hand, top, watched
from kvexp.attention.bands import Bands
from kvexp.budget import Budget
from kvexp.errors import UserError
from kvexp.methods.eviction.adakv import AdaKV
from kvexp.methods.eviction.query_statistics import QueryStatistics
from kvexp.methods.eviction.triattention import TriAttention
from kvexp.prompt import Context
from kvexp.stats.moments import Moments
from triattention_reference import SEGMENTS, Slow

PLAIN = TriAttention(mode="per_layer_perhead", interval=4, protect_prompt=False)
KINDS = ("concentration", "reconstruction")


def memory_of(family: str, folder: Path) -> QueryStatistics:
    """Statistics with reconstruction."""
    calibration = helpers.Calibration(Context((), ()), SEGMENTS, folder)
    method = replace(PLAIN, budgets="reconstruction")
    return method.prepare(helpers.model(family), calibration, Budget(None))


def uneven(family: str, folder: Path) -> QueryStatistics:
    """The same, where heads and layers differ: means and r made larger from head to head."""
    memory = memory_of(family, folder)
    for index, moments in memory.layers.items():
        count, share = moments.mean.shape[0], 1 - 0.2 * index
        wanted = share * torch.linspace(0.1, 0.8, count, dtype=torch.float64)
        now = moments.mean.abs().sum(-1) / moments.magnitude.sum(-1)
        memory.layers[index] = replace(moments, mean=moments.mean * (wanted / now)[:, None])
        memory.reconstruction[index] = share * torch.linspace(0.9, 0.2, count, dtype=torch.float64)
    return memory


def of_heads(memory: QueryStatistics, kind: str, index: int, heads: int) -> list[float]:
    """1 - R, or 1 - r, of each KV head, by loops over its query heads and bands."""
    moments, found = memory.layers[index], []
    group = moments.mean.shape[0] // heads
    for head in range(heads):
        members = range(head * group, (head + 1) * group)
        if kind == "reconstruction":
            found.append(1 - sum(float(memory.reconstruction[index][q]) for q in members) / group)
            continue
        kept = sum(abs(complex(m)) for q in members for m in moments.mean[q])
        found.append(1 - kept / sum(float(x) for q in members for x in moments.magnitude[q]))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_layers_share_rows_by_what_the_mean_leaves_open(kind: Any, tmp_path: Path) -> None:
    """Three layers share 3 * 20 rows: 10 each, and 30 in proportion, to the largest remainders."""
    memory = uneven("llama", tmp_path)
    method = replace(PLAIN, budgets=kind)
    held = method.encode(helpers.model("llama"), helpers.tokens(80), memory, 20).entries()
    weights = [of_heads(memory, kind, index, 1)[0] for index in sorted(memory.layers)]
    assert sum(held) == 60 and len(set(held)) > 1
    for rows, one in zip(held, weights, strict=True):
        assert abs(rows - (10 + 30 * one / sum(weights))) < 1


class Divided(Slow):
    """The reference, with rows of each head as the statistics say."""

    def __call__(self, events: list[Event]) -> list[list[list[int]]]:
        last, found = [event for event in events if event.forward == events[-1].forward], []
        for event in last:
            always = sorted(self.always(events, event))
            ranks = self.by_kv_head(events, event, set(always))
            rows = self.rows(event)
            found.append(
                [
                    top(rank, positions, n, always)
                    for rank, positions, n in zip(ranks, event.positions, rows, strict=True)
                ]
            )
        return found

    def rows(self, event: Event) -> list[int]:
        """Two heads: proportional shares, rounded to the nearest, at least 3 (two that stay, and one)."""
        first, second = of_heads(event.memory, self.method.head_budgets, event.place, 2)
        total = 2 * self.budget
        left = total - 6
        n = round(left * first / (first + second))
        return [3 + n, total - 3 - n]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_heads_keep_what_the_reference_keeps(kind: Any, family: str, tmp_path: Path) -> None:
    """At the prompt's end and while decoding, alone and in a padded batch; ragged."""
    method, memory = replace(PLAIN, head_budgets=kind, recent=2), uneven(family, tmp_path)
    for prompts in (PROMPTS[:1], PROMPTS):
        for sequence in watched(method, family, prompts, 12, 9, memory=memory):
            reference, lengths = Divided(method, family, 12), set()
            for forward in sorted({event.forward for event in sequence}):
                current = [event for event in sequence if event.forward == forward]
                if not any(event.evicts for event in current):
                    continue
                kept = reference([event for event in sequence if event.forward <= forward])
                for event, expected in zip(current, kept, strict=True):
                    assert event.kept == expected
                    assert sum(map(len, event.kept)) == 24
                    lengths |= {len(head) for head in event.kept}
            assert len(lengths) > 1


def test_both_levels_together_and_bytes_really_saved(tmp_path: Path) -> None:
    """Layers divide 3 * 20 rows, heads divide their layer's; rows of heads lie end to end."""
    method = replace(PLAIN, budgets="reconstruction", head_budgets="reconstruction")
    memory, model = uneven("llama", tmp_path), helpers.model("llama")
    cache: Any = method.encode(model, helpers.tokens(80), memory, 20)
    held = replace(method, head_budgets="uniform").encode(model, helpers.tokens(80), memory, 20).entries()
    lengths = [layer.sources[0].lengths[0] for layer in cache.layers]
    assert [sum(of_heads) for of_heads in lengths] == [2 * rows for rows in held]
    assert any(len(set(of_heads)) > 1 for of_heads in lengths)
    rows = sum(map(sum, lengths))
    width = model.config.head_dim
    assert cache.nbytes() == rows * (2 * width * 4 + 2 * 4)  # keys, values, slots and positions


def two_heads(first: float, second: float) -> QueryStatistics:
    """Two query heads with a mean of 1 of one band that does not turn, sizes such that 1 - R is as given."""
    none = torch.zeros(2, 0, dtype=torch.float64)
    size = torch.tensor([[1 / (1 - first)], [1 / (1 - second)]], dtype=torch.float64)
    moments = Moments(torch.ones(2, 1, dtype=torch.complex128), size, size**2, none, none, none)
    return QueryStatistics({0: moments}, {0: Bands(torch.zeros(1, dtype=torch.float64))})


def test_by_hand() -> None:
    """1 - R is 0.75 and 0.25: of 2 * 4 rows one each is sure, 6 are divided 4.5 to 1.5, and of equal
    remainders the first is rounded up: 6 and 2. S is the first number of a key (the norm is left out): the
    largest of 1, ..., 8 stay. Where two recent rows stay, three each are sure and 2 left: 1.5 and 0.5."""
    keys = torch.tensor([[[float(i), 0.0] for i in range(1, 9)]] * 2)
    step = (keys, keys, keys)
    method = TriAttention(mode="per_layer_perhead", norm="none", protect_prompt=False, max_offset=1)
    method = replace(method, head_budgets="concentration")
    assert by_hand(method, [step], 4, two_heads(0.75, 0.25)) == [[2, 3, 4, 5, 6, 7], [6, 7]]
    assert by_hand(method, [step], 4, two_heads(0.5, 0.5)) == [[4, 5, 6, 7]] * 2
    down = (keys, keys.flip(1), keys)
    assert by_hand(replace(method, recent=2), [down], 4, two_heads(0.75, 0.25)) == [
        [0, 1, 2, 6, 7],
        [0, 6, 7],
    ]
    assert by_hand(method, [step], 8, two_heads(0.75, 0.25)) == [list(range(8))] * 2


def test_a_prompt_stays_in_every_head_where_the_layer_holds_it(tmp_path: Path) -> None:
    """A head's share is never less than the prompt and one more; a layer too small for it lets it compete."""
    memory = uneven("llama", tmp_path)
    method = replace(PLAIN, protect_prompt=True, head_budgets="concentration", recent=1)
    [events] = watched(method, "llama", [PROMPTS[0][:9]], 14, 20, memory=memory)
    last = [event for event in events if event.forward == events[-1].forward]
    assert any(event.evicts for event in events)
    for event in last:
        assert all(head[:9] == list(range(9)) for head in event.kept)
    few = replace(PLAIN, protect_prompt=True, budgets="concentration", recent=2)
    [events] = watched(few, "llama", [PROMPTS[0][:16]], 20, 30, memory=memory)
    rows = few.bound(helpers.model("llama"), memory)
    for event in (event for event in events if event.evicts):
        holds = rows.layer_rows(event.place, 3, 20, event.upcoming) >= 16 + 3
        for head in event.kept:
            assert head[-2:] == [event.upcoming - 2, event.upcoming - 1]
            assert not holds or head[:16] == list(range(16))


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(UserError, match=r"method\.head_budgets=concentration gives heads budgets"):
        TriAttention(head_budgets="concentration")
    with pytest.raises(UserError, match=r"method\.base=triattention divides rows"):
        AdaKV(base=replace(PLAIN, interval=128, head_budgets="concentration"))
    assert AdaKV(base=replace(PLAIN, interval=128)).divides
