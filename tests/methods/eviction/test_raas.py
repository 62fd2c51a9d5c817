from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from evict import Event, by_hand, each_setting, hold, watched
from helpers import tokens
from kvexp.budget import Budget
from kvexp.errors import UserError
from kvexp.methods.eviction.raas import RaaS

PROMPTS = [tokens(n, seed=n) for n in (40, 36, 38)]
Attention = Callable[[Event, int, dict[int, list[int]]], dict[int, float]]


def grouped(positions: list[int], prompt: int, size: int) -> dict[int, list[int]]:
    """Indices of rows by page, pages counted from the end of the prompt."""
    pages: dict[int, list[int]] = {}
    for i, position in enumerate(positions):
        pages.setdefault((position - prompt) // size, []).append(i)
    return pages


def exact(event: Event, head: int, pages: dict[int, list[int]]) -> dict[int, float]:
    shares = event.probabilities(head)[-1].tolist()
    return {page: max(shares[i] for i in rows) for page, rows in pages.items()}


def from_extremes(event: Event, head: int, pages: dict[int, list[int]]) -> dict[int, float]:
    query, keys = event.queries[head, -1].tolist(), event.keys[head // event.group].tolist()
    logits = []
    for rows in pages.values():
        channels = zip(query, zip(*(keys[i] for i in rows), strict=True), strict=True)
        logits.append(sum(max(q * max(values), q * min(values)) for q, values in channels) * event.scale)
    return dict(zip(pages, torch.tensor(logits).softmax(0).tolist(), strict=True))


def over_heads(event: Event, kv: int, pages: dict[int, list[int]], how: Attention) -> dict[int, float]:
    each = [how(event, head, pages) for head in range(kv * event.group, (kv + 1) * event.group)]
    return {page: max(one[page] for one in each) for page in pages}


class Naive:
    """A slow RaaS for one sequence; `useful(attention by page, pages that may leave)` are renewed."""

    def __init__(self, budget: int, size: int, how: Attention, useful: Any, protect: bool = True) -> None:
        self.budget, self.size, self.how, self.useful, self.protect = budget, size, how, useful, protect
        self.times: dict[tuple[int, int], dict[int, int]] = {}
        self.prompt: dict[int, int] = {}
        self.read = 0

    def __call__(self, events: list[Event]) -> list[list[list[int]]]:
        kept: dict[tuple[int, int], list[list[int]]] = {}
        for event in events[self.read :]:  # those before were followed in earlier calls
            known = self.prompt.get(event.place)
            if not event.reading:
                self.prompt.setdefault(event.place, event.upcoming)
            kept[event.forward, event.place] = [
                self.prompt_end(event, kv) if known is None else self.step(event, kv, known)
                for kv in range(len(event.keys))
            ]
        self.read = len(events)
        last = events[-1].forward
        return [kept[last, event.place] for event in events if event.forward == last]

    def prompt_end(self, event: Event, kv: int) -> list[int]:
        positions = event.positions[kv]
        pages = grouped(positions, event.upcoming, self.size)
        attention = over_heads(event, kv, pages, self.how)
        attention[-1] = 2.0  # the last page, which is being filled
        page_of = {i: page for page, rows in pages.items() for i in rows}
        order = sorted(range(len(positions)), key=lambda i: (-attention[page_of[i]], i))
        return sorted(positions[i] for i in order[: self.budget])

    def step(self, event: Event, kv: int, prompt: int) -> list[int]:
        times = self.times.setdefault((event.place, kv), {})
        positions, now = event.positions[kv], event.upcoming - prompt
        pages = grouped(positions, prompt, self.size)
        protects = self.protect and prompt + self.size <= self.budget
        times[event.upcoming - 1] = now
        attention = over_heads(event, kv, pages, self.how)
        may_leave = [page for page in pages if page >= 0 or not protects]
        for page in self.useful(attention, may_leave):
            times.update({positions[i]: now for i in pages[page]})
        current = (now - 1) // self.size
        kept = list(positions)
        leaving = -(-max(0, len(kept) - self.budget) // self.size) * self.size
        age = {page: max(times.get(positions[i], 0) for i in rows) for page, rows in pages.items()}
        for page in sorted((page for page in may_leave if page != current), key=lambda p: (age[p], p)):
            for i in reversed(pages[page]):
                if leaving:
                    kept.remove(positions[i])
                    leaving -= 1
        return kept


def above(alpha: float) -> Any:
    return lambda attention, may_leave: [page for page, a in attention.items() if a > alpha]


def best(percent: int) -> Any:
    def chosen(attention: dict[int, float], may_leave: list[int]) -> list[int]:
        count = max(1, len(may_leave) * percent // 100)
        return sorted(may_leave, key=lambda page: (-attention[page], page))[:count]

    return chosen


@each_setting
@pytest.mark.parametrize(("family", "estimate"), [("llama", "page"), ("qwen3", "exact")])
def test_keeps_what_the_reference_keeps(family: str, dtype: torch.dtype, estimate: Any) -> None:
    """A budget of 47 holds the prompts of 40, 36 and 38 tokens and at least one page."""
    how, alpha = (from_extremes, 0.11) if estimate == "page" else (exact, 0.06)
    method = RaaS(page=4, alpha=alpha, estimate=estimate)
    for prompts in (PROMPTS[:1], PROMPTS):
        events = watched(method, family, prompts, 47, 17, dtype)
        assert len(events) == len(prompts)
        for sequence in events:
            assert hold(sequence, Naive(47, 4, how, above(alpha))) >= 2 * 2
            assert all(event.kept[0][:36] == list(range(36)) for event in sequence if not event.reading)


@pytest.mark.parametrize(
    ("budget", "knobs", "how", "useful"),
    [
        (47, {"variant": "top"}, from_extremes, best(50)),
        (47, {"variant": "top", "estimate": "exact", "top_percent": 30}, exact, best(30)),
        (15, {"estimate": "exact", "alpha": 0.08}, exact, above(0.08)),
        (15, {"alpha": 0.2}, from_extremes, above(0.2)),
        (47, {"protect_prompt": False, "alpha": 0.1}, from_extremes, above(0.1)),
    ],
    ids=["top", "top exact", "long prompt exact", "long prompt", "no protection"],
)
def test_variants(budget: int, knobs: dict[str, Any], how: Attention, useful: Any) -> None:
    method = RaaS(**{"page": 4, **knobs})
    for sequence in watched(method, "qwen3", PROMPTS[:2], budget, 17):
        assert hold(sequence, Naive(budget, 4, how, useful, method.protect_prompt)) >= 4
        for event in sequence:
            if not event.reading:
                assert {len(kept) for kept in event.kept} <= set(range(budget + 1))


def test_whole_pages_leave() -> None:
    """With a prompt of 40 and pages of 4, a budget of 47 is passed at the 8th token: 4 rows leave at once."""
    (sequence,) = watched(RaaS(page=4), "llama", PROMPTS[:1], 47, 20)
    sizes = [len(event.kept[0]) for event in sequence if event.place == 0 and not event.reading]
    assert sizes == [40, 41, 42, 43, 44, 45, 46, 47, 44, 45, 46, 47, 44, 45, 46, 47, 44, 45, 46, 47]


def token(key: list[float], query: list[float]) -> tuple[Any, Any, Any]:
    return torch.tensor([[query]]), torch.tensor([[key]]), torch.tensor([[key]])


A, B, N = [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]


def run(method: RaaS, tokens: list[tuple[list[float], list[float]]], budget: int) -> list[int]:
    """A prompt of two tokens, then decoded tokens as pairs of key and query."""
    prompt = torch.zeros(1, 1, 2)
    first = [(prompt, prompt, prompt), (prompt, prompt, prompt)]
    (kept,) = by_hand(method, [*first, *(token(key, query) for key, query in tokens)], budget)
    return kept


@pytest.mark.parametrize("estimate", ["page", "exact"])
def test_by_hand(estimate: Any) -> None:
    """Pages of two decoded tokens: keys A A, B B, then 0. A query of 9 A or 9 B gives its page nearly all.

    The prompt holds positions 0 and 1; the pages hold 2 3, 4 5 and 6. The queries of tokens 1 to 4 are 0, so
    that rows have at most 1/3 and pages, from the third token on, too. With alpha = 0.4 the pages keep the
    times 2 and 4 of their latest rows. A budget of 6 is passed at token 5: the page of As leaves if its query
    turns to B (half of it for each row), the page of Bs if it turns to A, since the As' time becomes 5.
    """
    method = RaaS(page=2, alpha=0.4, estimate=estimate)
    made = [(A, N), (A, N), (B, N), (B, N)]
    assert run(method, [*made, (N, [0.0, 9.0])], 6) == [0, 1, 4, 5, 6]
    assert run(method, [*made, (N, [9.0, 0.0])], 6) == [0, 1, 2, 3, 6]


def test_equal_times_by_hand() -> None:
    """With a small alpha the fifth token renews all pages: the earlier of the two that may leave does."""
    made = [(A, N), (A, N), (B, N), (B, N), (N, N)]
    assert run(RaaS(page=2, alpha=0.01), made, 6) == [0, 1, 4, 5, 6]


def test_the_page_knows_its_extremes_alone() -> None:
    """Keys 3A and 3B share a page, A + B and A + B the next; a query (2, 2) gives each single row 6, 6, 4, 4.

    The extremes of the first page are 3 in both channels, a bound of 12: its share is 0.9996, above 0.5 as
    none of its rows is (each has 0.44). So only the estimate by pages renews it.
    """
    made = [([3.0, 0.0], N), ([0.0, 3.0], N), ([1.0, 1.0], N), ([1.0, 1.0], N), (N, [2.0, 2.0])]
    assert run(RaaS(page=2, alpha=0.5, estimate="page"), made, 6) == [0, 1, 2, 3, 6]
    assert run(RaaS(page=2, alpha=0.5, estimate="exact"), made, 6) == [0, 1, 4, 5, 6]


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"page": 0}, "page=0 is no number of rows"),
        ({"alpha": 0.0}, "alpha=0.0 is no probability"),
        ({"top_percent": 0}, "top_percent=0 is no share"),
        ({"top_percent": 101}, "use 1 to 100"),
    ],
)
def test_knobs(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        RaaS(**knobs)


def test_the_budget_holds_a_page() -> None:
    RaaS(sinks=2).check_budget(Budget(19))
    with pytest.raises(UserError, match="budget=19 or more"):
        RaaS(sinks=2).check_budget(Budget(18))
