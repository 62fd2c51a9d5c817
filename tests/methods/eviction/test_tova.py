from __future__ import annotations

import pytest
import torch

from evict import PROMPTS, Event, Reference, by_hand, each_setting, hold, top, watched
from kvexp.budget import Budget
from kvexp.errors import UserError
from kvexp.methods.eviction.tova import TOVA
from snap import latest, merged


def reference(budget: int, method: TOVA) -> Reference:
    def kept(events: list[Event]) -> list[list[list[int]]]:
        found = []
        for event in latest(events):
            heads = [event.probabilities(head)[-1].tolist() for head in range(event.queries.shape[0])]
            scores = torch.tensor(merged(heads, method.group))
            always = [*range(method.sinks), *range(event.upcoming - method.recent, event.upcoming)]
            found.append([top(scores, event.positions[0], budget, always)] * len(event.keys))
        return found

    return kept


@each_setting
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_keeps_what_the_reference_keeps(family: str, dtype: torch.dtype) -> None:
    for prompts in (PROMPTS[:1], PROMPTS):
        events = watched(TOVA(), family, prompts, 12, 6, dtype)
        assert len(events) == len(prompts)
        for sequence in events:
            assert (
                hold(sequence, reference(12, TOVA())) == 7 * sequence[-1].n_layers
            )  # the prompt's end, 6 steps


@pytest.mark.parametrize("method", [TOVA(recent=1), TOVA(group="max"), TOVA(sinks=2, interval=3)])
def test_variants_keep_what_the_reference_keeps(method: TOVA) -> None:
    for sequence in watched(method, "llama", PROMPTS, 12, 6):
        assert hold(sequence, reference(12, method)) >= 3 * sequence[-1].n_layers


def test_heads_of_a_layer_hold_the_same_tokens() -> None:
    layers = set()
    for event in watched(TOVA(), "llama", PROMPTS[:1], 12, 6)[0]:
        assert event.kept[0] == event.kept[1]
        layers.add(str(event.kept[0]))
    assert len(layers) > 7  # but layers differ


def test_by_hand() -> None:
    """Two query heads give the rows 1 5 3 1 and 4 1 1 4 of ten: on average 5 6 4 5 of twenty.

    Rows 1, 0 and 3 are best; with two rows the last token leaves, unless it is pinned. The largest heads are
    4 5 3 4 of ten. The next token's query gives the rows that are left (1, 0) and itself 1 2 7, so 0 stays.
    """
    keys = torch.tensor([[1.0, 5.0, 3.0, 1.0], [4.0, 1.0, 1.0, 4.0]]).log().T[None]
    prompt = torch.eye(2)[:, None].expand(2, 4, 2), keys, keys
    assert by_hand(TOVA(), [prompt], 3) == [[0, 1, 3]]
    assert by_hand(TOVA(), [prompt], 2) == [[0, 1]]
    assert by_hand(TOVA(recent=1), [prompt], 2) == [[1, 3]]
    assert by_hand(TOVA(group="max"), [prompt], 2) == [[0, 1]]
    key = torch.tensor([[[49.0, 4.0]]]).log()  # the query below sees it as 49 ** 0.5 * 4 ** 0 = 7
    query = torch.tensor([[[0.0, 0.5]], [[0.0, 0.5]]])  # and rows 0 and 1 as 4 ** 0.5 = 2 and 1
    assert by_hand(TOVA(), [prompt, (query, key, key)], 2) == [[0, 4]]


def test_by_hand_each_head_has_its_own_keys() -> None:
    """KV head 0 gives 8 1 1 of ten, KV head 1 gives 0 6 4: of twenty 8 7 5, so both heads keep 0 and 1."""
    keys = torch.tensor([[[8.0], [1.0], [1.0]], [[1e-9], [6.0], [4.0]]]).log()
    ones = torch.ones_like(keys)
    assert by_hand(TOVA(), [(ones, keys, keys)], 2) == [[0, 1], [0, 1]]


def test_smallest_budget() -> None:
    TOVA(recent=3).check_budget(Budget(4))
    with pytest.raises(UserError, match="use budget=2 or more"):
        TOVA().check_budget(Budget(1))
