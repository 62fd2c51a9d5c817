"""Sizes that fill a length, and the border between context and query."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvexp import tiny
from kvexp.errors import UserError
from kvexp.tasks.fitting import cut, largest


@pytest.fixture(scope="module")
def paired() -> PreTrainedTokenizerFast:
    """One token a byte, and one for two line breaks, in the pre-tokenisation of GPT-2."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**letters, "ĊĊ": len(letters)}, merges=[("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def fitted(costs: list[int], room: int, guess: int, low: int = 0, slack: int = 0):
    """The size that `largest` finds where `costs[i]` is the cost of size `low + i`, and the sizes tried."""
    tried: list[int] = []

    def cost(size: int) -> int:
        tried.append(size)
        return costs[size - low]

    return largest(cost, room, low, low + len(costs) - 1, guess, slack), tried


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(0, 900), st.integers(-5, 80))
def test_the_largest_size_is_that_of_a_search_through_all(steps, room, guess):
    costs = list(accumulate(steps))
    found, tried = fitted(costs, room, guess, low=3)
    fitting = [3 + i for i, cost in enumerate(costs) if cost <= room]
    assert found == (fitting[-1] if fitting else None)
    assert len(tried) == len(set(tried))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 100), min_size=1, max_size=40), st.integers(0, 100), st.integers(0, 40))
def test_a_cost_that_does_not_rise_still_gives_a_size_that_fits(costs, room, guess):
    found, _ = fitted(costs, room, guess)
    assert costs[0] > room if found is None else costs[found] <= room


def test_a_linear_cost_takes_few_tries_whatever_the_guess():
    for guess in (1, 300, 9000):
        found, tried = fitted([950 + 15 * i for i in range(10000)], 4000, guess)
        assert found == 203 and len(tried) <= 6  # 950 + 15 * 203 = 3995


def test_slack_takes_a_size_that_is_near_enough():
    costs = [20 * i for i in range(1000)]
    assert fitted(costs, 4015, 200, slack=15) == (200, [200])
    assert fitted(costs, 4015, 200, slack=14)[0] == 200 and len(fitted(costs, 4015, 200)[1]) == 2


def test_the_context_is_a_token_prefix_and_starts_with_bos():
    tokenizer = tiny.tokenizer()
    parts = cut(tokenizer, "a text\n", "and more")
    assert parts.context.header == (tokenizer.bos_token_id,) and parts.query == "and more"
    assert len(parts.context) == 1 + len("a text\n") and len(parts.query_ids) == len("and more")
    assert tokenizer.decode([*parts.context.ids[1:], *parts.query_ids]) == "a text\nand more"


def test_line_breaks_move_to_the_query_where_the_tokenizer_merges_them(paired):
    """Two line breaks at the end of a text are one token, and before a word they are two."""
    parts = cut(paired, "red\n\n", "blue")
    assert len(paired.encode("red\n\n")) == len("red") + 1 and len(paired.encode("red\n\nblue")) == 9
    assert paired.decode(parts.context.ids) == "red\n" and parts.query == "\nblue"
    assert [*parts.context.ids, *parts.query_ids] == paired.encode("red\n\nblue")
    assert parts.context.header == ()  # this tokenizer has no BOS


def test_a_tokenizer_that_merges_across_the_border_is_refused(words: PreTrainedTokenizerFast):
    with pytest.raises(UserError, match=r"merges 'the bl' with the 'ue' that follows.*use another model"):
        cut(words, "the bl", "ue")
