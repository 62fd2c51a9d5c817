from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from evict import PROMPTS, Event, Reference, by_hand, each_setting, hold, top, watched
from kvexp.errors import UserError
from kvexp.methods.eviction.lazyeviction import LazyEviction

State = dict[int, tuple[int, int]]  # position -> (TS, MRI)


def latest(event: Event, kv: int, group: str) -> list[float]:
    """The last query's probabilities, the largest (or mean) of the heads that share a KV head."""
    heads = range(kv * event.group, (kv + 1) * event.group)
    found = torch.stack([event.probabilities(head)[-1] for head in heads])
    return (found.amax(0) if group == "max" else found.mean(0)).tolist()


class States:
    """(TS, MRI) of every row of a sequence by (layer, KV head), and the length of the prompt."""

    def __init__(self, alpha: float, group: str) -> None:
        self.alpha, self.group = alpha, group
        self.rows: dict[tuple[int, int], State] = {}
        self.prompt: dict[int, int] = {}
        self.read = 0

    def follow(self, events: list[Event]) -> None:
        """Go through the events that came since the last call."""
        for event in events[self.read :]:
            if event.place in self.prompt:
                for kv in range(len(event.keys)):
                    self.step(event, kv, event.upcoming - self.prompt[event.place])
            elif not event.reading:  # the first forward after the context reads the query
                self.prompt[event.place] = event.upcoming
        self.read = len(events)

    def step(self, event: Event, kv: int, step: int) -> None:
        state = self.rows.setdefault((event.place, kv), {})
        for position, a in zip(event.positions[kv], latest(event, kv, self.group), strict=True):
            ts, mri = state.get(position, (step - 1 if position == event.upcoming - 1 else 0, 0))
            if a >= self.alpha:
                ts, mri = step, max(mri, step - ts)
            state[position] = ts, mri


def worth(ts: int, mri: int, step: int, form: str) -> float:
    def twice(x: float) -> float:
        return 2 * float(torch.tensor(x).sigmoid())

    if form == "code":
        return twice(-(1 + (step - ts) / (mri + 1e-5))) + (twice(-(mri - 1)) if mri else 0.0)
    return twice(-(step - ts) / mri) + twice(-1 / mri) if mri else 0.0


def reference(budget: int, recent: int, alpha: float, form: str = "code", group: str = "max") -> Reference:
    states = States(alpha, group)

    def kept(events: list[Event]) -> list[list[list[int]]]:
        states.follow(events)
        found = []
        for event in (event for event in events if event.forward == events[-1].forward):
            heads = []
            for kv, positions in enumerate(event.positions):
                rows = states.rows.get((event.place, kv))
                if rows is None:
                    scores = latest(event, kv, group)
                else:
                    step = event.upcoming - states.prompt[event.place]
                    scores = [worth(*rows[p], step, form) for p in positions]
                always = range(event.upcoming - recent, event.upcoming)
                heads.append(top(torch.tensor(scores), positions, budget, always))
            found.append(heads)
        return found

    return kept


@each_setting
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_keeps_what_the_reference_keeps(family: str, dtype: torch.dtype) -> None:
    method = LazyEviction(interval=4, recent=4, alpha=0.08)
    for prompts in (PROMPTS[:1], PROMPTS):
        events = watched(method, family, prompts, 14, 17, dtype)
        assert len(events) == len(prompts)
        for sequence in events:
            assert hold(sequence, reference(14, 4, 0.08)) >= 8  # 2 layers, prompt end and every 4 tokens


@pytest.mark.parametrize(
    ("knobs", "arguments"),
    [
        ({"form": "paper"}, {"form": "paper"}),
        ({"group": "mean"}, {"group": "mean"}),
        ({"prefill": "off", "trigger": "slack", "interval": 1}, {}),
    ],
    ids=["paper", "mean", "each step"],
)
def test_variants(knobs: dict[str, Any], arguments: dict[str, str]) -> None:
    method = LazyEviction(**{"interval": 4, "recent": 3, "alpha": 0.06, **knobs})
    for sequence in watched(method, "qwen3", PROMPTS, 13, 17):
        assert hold(sequence, reference(13, 3, 0.06, **arguments)) >= 8


LN3 = 1.0986123


def step(*query: float) -> tuple[Any, Any, Any]:
    """A token whose key is orthogonal to all queries and whose query turns to some of the prompt's rows."""
    queries = torch.tensor([[[*query, 0.0]]])
    key = torch.tensor([[[0.0] * len(query) + [1.0]]])
    return queries, key, key


def run(method: LazyEviction, queries: list[list[float]], budget: int) -> list[int]:
    """Three rows of the prompt, each seen by its own coordinate of a query; the last of them is the query."""
    keys = torch.eye(4)[None, :3]
    zero = torch.zeros(1, 2, 4)
    steps: list[Any] = [(zero, keys[:, :2], keys[:, :2]), (zero[:, :1], keys[:, 2:], keys[:, 2:])]
    (kept,) = by_hand(method, [*steps, *(step(*query) for query in queries)], budget)
    return kept


def test_by_hand() -> None:
    """A query of 5 in coordinate j gives row j more than 0.9 of four to six rows, 0 the same to all.

    With alpha = 0.5 the active rows are 0, 1, 0 at steps 1 to 3, so after step 3 the prompt's rows have
    (TS, MRI) = (3, 2), (2, 2) and (0, 0), and those of steps 1 to 3 (0, 0), (1, 0) and (2, 0). Rows 0 and
    1 score 2 s(-1) + 2 s(-1) = 1.08 and 2 s(-1.5) + 2 s(-1) = 0.90 by the code, 1 + 2 s(-1/2) = 1.76 and
    2 s(-1/2) + 2 s(-1/2) = 1.51 by the paper; the others score 0, and the first of them stay.
    """
    queries = [[5.0, 0, 0], [0, 5.0, 0], [5.0, 0, 0]]
    for form in ("code", "paper"):
        method = LazyEviction(interval=1, trigger="slack", recent=1, alpha=0.5, prefill="off", form=form)
        assert run(method, queries, 5) == [0, 1, 2, 3, 5]
        for budget, kept in ((3, [0, 1, 5]), (2, [0, 5])):  # once, after step 3
            once = replace(method, interval=6 - budget)
            assert run(once, queries, budget) == kept


def test_the_forms_disagree_on_long_pauses() -> None:
    """Row 1 is active at steps 1 and 2, row 0 at step 4 alone: (TS, MRI) = (4, 4) and (2, 1) after step 4.

    Code: row 0 has 2 s(-1) + 2 s(-3) = 0.54 + 0.09 = 0.63, row 1 2 s(-3) + 2 s(0) = 0.09 + 1 = 1.09. Paper:
    row 0 has 2 s(0) + 2 s(-1/4) = 1 + 0.88 = 1.88, row 1 2 s(-2) + 2 s(-1) = 0.24 + 0.54 = 0.78.
    """
    queries = [[0, 5.0, 0], [0, 5.0, 0], [0.0, 0, 0], [5.0, 0, 0]]
    for form, best in (("code", 1), ("paper", 0)):
        method = LazyEviction(interval=5, trigger="slack", recent=1, alpha=0.5, form=form)  # type: ignore[arg-type]
        assert run(method, queries, 2) == [best, 6]


def test_a_prompt_above_the_budget_by_its_last_query() -> None:
    """On keys 0, 1, 0 the last query, -ln 3, gives 3 : 1 : 3; row 2 is recent, row 0 the best other.

    The queries before it, which prefer row 1, do not count. All turned round, 1 : 3 : 1 makes it row 1.
    """
    keys = torch.tensor([[[0.0], [1.0], [0.0]]])
    queries = torch.tensor([[[9.0], [9.0], [-LN3]]])
    method = LazyEviction(recent=1)
    assert by_hand(method, [(queries, keys, keys)], 2) == [[0, 2]]
    assert by_hand(method, [(-queries, keys, keys)], 2) == [[1, 2]]


@pytest.mark.parametrize("alpha", [0.0, 1.0, -1.0])
def test_alpha_is_a_probability(alpha: float) -> None:
    with pytest.raises(UserError, match=r"method.alpha=.* use 0.0001"):
        LazyEviction(alpha=alpha)
