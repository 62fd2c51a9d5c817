"""Which tokens the baselines encode."""

from __future__ import annotations

import pytest
import torch

import helpers
from kvexp.budget import Budget
from kvexp.errors import UserError
from kvexp.methods.baseline.full import Full
from kvexp.methods.baseline.no_context import NoContext
from kvexp.methods.baseline.truncate import Truncate
from kvexp.prompt import Context
from kvexp.tasks.batch import QueryBatch

CONTEXT = Context((1, 2), ((10, 11, 12), (20, 21), (30, 31, 32, 33)))


@pytest.mark.parametrize(
    ("keep", "rows", "ids"),
    [
        ("tail", 8, [1, 2, 20, 21, 30, 31, 32, 33]),
        ("tail", 7, [1, 2, 30, 31, 32, 33]),  # (20, 21) does not fit, so no earlier one is taken either
        ("tail", 5, [1, 2]),
        ("head", 7, [1, 2, 10, 11, 12, 20, 21]),
        ("head", 10, [1, 2, 10, 11, 12, 20, 21]),
        ("head", 5, [1, 2, 10, 11, 12]),
        ("head", 2, [1, 2]),
        ("head", 11, list(CONTEXT.ids)),
        ("tail", None, list(CONTEXT.ids)),
    ],
)
def test_whole_demonstrations_up_to_the_budget(keep, rows, ids):
    assert list(Truncate(keep).select(CONTEXT, Budget(rows))) == ids


def test_truncated_plain_ids_lose_one_end():
    assert list(Truncate("head").select([5, 6, 7], Budget(2))) == [5, 6]
    assert list(Truncate("tail").select([5, 6, 7], Budget(2))) == [6, 7]
    assert list(Truncate().select([5, 6, 7], None)) == [5, 6, 7]


def test_a_budget_below_the_header_is_refused():
    with pytest.raises(
        UserError, match="budget=1 is smaller than the prompt's header of 2 tokens, use budget=2"
    ):
        Truncate().select(CONTEXT, Budget(1))


def test_full_and_no_context():
    assert list(Full().select(CONTEXT, Budget(3))) == list(CONTEXT.ids)
    assert list(NoContext().select(CONTEXT, None)) == [1, 2]
    assert list(NoContext().select([5, 6], None)) == []


@pytest.mark.parametrize("method", [Full(), NoContext(), Truncate()])
def test_queries_stand_right_behind_what_was_kept(method):
    """The answer is that of an ordinary forward over the kept tokens and the query."""
    model, context, query = helpers.model("llama"), helpers.context(), helpers.QUERIES[0]
    budget = Budget(20)
    cache = method.encode(model, context, None, budget)
    kept = method.select(context, budget)
    assert cache.seen == len(kept)
    with method.attach(model):
        ours = QueryBatch(model, cache, [query]).logits[0]
    full = helpers.plain_logits(model, [*kept, *query])[-1]
    torch.testing.assert_close(ours, full, rtol=0, atol=1e-4)


def test_with_no_tokens_at_all_the_query_stands_alone():
    model, query = helpers.model("llama"), helpers.QUERIES[0]
    method = NoContext()
    cache = method.encode(model, list(helpers.tokens(9)))
    with method.attach(model):
        ours = QueryBatch(model, cache, [query]).logits[0]
    torch.testing.assert_close(ours, helpers.plain_logits(model, query)[-1], rtol=0, atol=1e-4)


def test_a_budget_may_be_written_as_a_number():
    assert list(Truncate().select(range(10), 3)) == list(Truncate().select(range(10), "30%")) == [7, 8, 9]
    for method in (Full(), Truncate()):
        with pytest.raises(UserError, match="budget=0 leaves no row"):
            method.encode(helpers.model("llama"), [1, 2], budget=0)


def test_generate_goes_on_from_what_was_selected():
    """The README's recipe gives what the model says after the kept ids alone."""
    model, method, prefix, query = helpers.model("llama"), Truncate(), helpers.tokens(40), helpers.QUERIES[0]
    model.generation_config.eos_token_id = None
    cache, ids = method.encode(model, prefix, budget=20), [*method.select(prefix, 20), *query]
    assert cache.seen == 20
    options = {"max_new_tokens": 4, "do_sample": False}
    plain = model.generate(torch.tensor([ids]), **options)
    with method.attach(model):
        assert torch.equal(model.generate(torch.tensor([ids]), cache=cache.fork(), **options), plain)
